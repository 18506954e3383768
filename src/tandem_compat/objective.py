"""Losses, advantages and corrections by TRL's names, which Axolotl and ms-swift share."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.types import Json
from tandem_compat.table import Reader

REDUCTIONS: Mapping[str, str] = {
    "grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant", "cispo": "token", "sapo": "sequence",
}  # fmt: skip
"""loss_type: what the sum over tokens is divided by."""
SCALES: Mapping[str, str] = {
    "group": "grpo", "true": "grpo", "True": "grpo", "batch": "batch_std", "none": "dr_grpo", "false": "dr_grpo",
    "False": "dr_grpo", "gdpo": "gdpo",
}  # fmt: skip
"""scale_rewards: the advantage."""
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""Modes of importance sampling."""


def trl_conditions(reader: Reader, prefix: str = "") -> dict[str, bool]:
    """Conditions under which TRL's options count, and whether they hold; ``prefix`` stands before their names."""
    vllm, colocated = bool(reader[f"{prefix}use_vllm"]), reader[f"{prefix}vllm_mode"] == "colocate"
    return {
        "vllm": vllm,
        "server": vllm and not colocated,
        "colocate": vllm and colocated,
        "corrections": weighs_trl(reader, prefix),
        "beta": bool(reader[f"{prefix}beta"]),
        "sync_ref_model": bool(reader[f"{prefix}beta"] and reader[f"{prefix}sync_ref_model"]),
        "log_completions": bool(reader[f"{prefix}log_completions"]),
    }


def put_groups(
    reader: Reader, option: str, size: int, completions: int, factors: str, remedy: str = "change one of the three"
) -> int:
    """Set the groups of a step and their size; returns how many there are.

    Args:
        reader: what the options of the other system come to.
        option: the option that says how large a group is, or makes it too small.
        size: completions of a group.
        completions: those of a step.
        factors: what they are the product of, in words.
        remedy: what makes them whole groups.
    """
    groups, rest = divmod(completions, size)
    if size < 2:
        reader.wrong(option, "a group needs at least 2 answers: each is judged against its siblings")
    elif (rest or not groups) and not reader.problems:
        what = f"a step has {factors} = {completions} completions"
        reader.wrong(option, f"{what}, which are no whole number of groups of {size}; {remedy}")
    reader.put("group_size", size, option)
    reader.put("groups_per_step", max(groups, 1), "gradient_accumulation_steps", "micro_batch_size")
    return max(groups, 1)


def put_loss(reader: Reader, prefix: str = "") -> str:
    """Set the loss and what it is divided by; returns its kind. ``prefix`` stands before the options' names."""
    named, level = prefix + "loss_type", prefix + "importance_sampling_level"
    clipless = reader[named] in ("cispo", "sapo")
    kind: str = reader[named] if clipless else "grpo" if reader[level] == "token" else "gspo"
    reader.put("loss.kind", kind, named, level)
    reader.put("loss.reduction", REDUCTIONS[reader[named]], named)
    return kind


def put_clips(reader: Reader, kind: str, prefix: str = "", *, differ: bool, dual_clip: float | None = None) -> None:
    """Set what epsilon and epsilon_high are to this loss; ``differ``: whether any ratio may be other than 1."""
    low, high = prefix + "epsilon", prefix + "epsilon_high"
    most = reader[low] if reader[high] is None else reader[high]
    if kind == "cispo":
        reader.put("loss.cap", most, high, low)
    elif kind != "sapo" and differ:
        reader.put("loss.clip_low", reader[low], low)
        reader.put("loss.clip_high", most, high, low)
        if kind == "grpo":
            reader.put("loss.dual_clip", dual_clip, low)


def put_reference(reader: Reader, prefix: str = "", **options: Json) -> None:
    """Set the reference of the penalty, if there is one; it moves where sync_ref_model says so."""
    beta, moves, steps = (prefix + name for name in ("beta", "sync_ref_model", "ref_model_sync_steps"))
    if not reader[beta]:
        return
    reader.put("reference.kind", "average" if reader[moves] else "start", moves, beta)
    for name, value in {"beta": reader[beta], **options}.items():
        reader.put(f"reference.{name}", value, f"{prefix}use_bias_correction_kl" if name != "beta" else beta)
    if reader[moves]:
        reader.put("reference.every", reader.per_step(reader[steps]), steps)


def put_corrections(
    reader: Reader, option: str, mode: str, bounds: Mapping[str, Json], threshold: str, *, sampled: bool
) -> None:
    """Set the weights for how far the sampler was from the policy.

    Args:
        reader: what the options of the other system come to.
        option: the option that names the mode.
        mode: one of ``CORRECTIONS``; empty: nothing is weighed.
        bounds: of the weights.
        threshold: the option of OPSM's threshold.
        sampled: ratios are to what was sampled with, and hold those weights: only what is out of bounds is left out.
    """
    corrections: list[Json] = []
    kind, _, beyond = mode.partition("_")
    if sampled and beyond == "truncate":
        reader.note(option, f"{mode} is left out: ratios to the engine, clipped by epsilon, hold its weights")
    elif mode:
        corrections.append({"kind": kind, "beyond": beyond, **bounds})
    if reader[threshold] is not None:
        corrections.append({"kind": "opsm", "threshold": reader[threshold]})
    if corrections:
        reader.put("corrections", corrections, option, threshold)


def weighs_trl(reader: Reader, prefix: str = "") -> bool:
    """Whether TRL's corrections weigh how far the sampler was from the policy: with vLLM alone."""
    return bool(reader[f"{prefix}use_vllm"] and reader[f"{prefix}vllm_importance_sampling_correction"])


def put_trl_corrections(reader: Reader, prefix: str = "", *, usual: str = "sequence_mask", sampled: bool) -> None:
    """Set the weights as ``put_corrections``, by TRL's options; ``usual`` is the mode where none is named."""
    option, threshold = f"{prefix}vllm_importance_sampling_mode", f"{prefix}off_policy_mask_threshold"
    mode = reader.get(option, usual) if weighs_trl(reader, prefix) else ""
    # The greatest weight has an older and a newer name.
    cap, most, least = (f"{prefix}vllm_importance_sampling_{name}" for name in ("cap", "clip_max", "clip_min"))
    low = {"low": reader[least]} if least in reader else {}
    bounds = {**low, "high": reader.get(most, reader.get(cap, 3.0))}
    put_corrections(reader, option, mode, bounds, threshold, sampled=sampled)
