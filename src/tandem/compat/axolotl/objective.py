"""Rewards, sampling and the objective of an Axolotl file, with the defaults of TRL where it leaves one out."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.compat.axolotl.draft import Draft
from tandem.compat.axolotl.rollout import REWARD
from tandem.compat.generation import translated
from tandem.types import Json

REDUCTIONS = {
    "grpo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
    "sapo": "sequence",
}
"""trl.loss_type: what the sum over tokens is divided by."""

LENGTH = 512
"""TRL's trl.max_completion_length."""

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")


def put(recipe: Draft) -> None:
    """All of it."""
    _rewards(recipe)
    _sampling(recipe)
    _advantage(recipe)
    _loss(recipe)
    _reference(recipe)
    file = recipe.file
    if file.get("trl.mask_truncated_completions"):
        recipe.put("truncated", "mask", "trl.mask_truncated_completions")
    _differences(recipe)
    _again(recipe)
    dropped = file.get("trl.skip_zero_advantage_batches", True)
    recipe.put("zero_variance_groups", "drop" if dropped else "keep", "trl.skip_zero_advantage_batches")
    if dropped:
        file.note(
            "trl.skip_zero_advantage_batches", "groups of equal rewards are not trained; others are sampled instead"
        )


def _differences(recipe: Draft) -> None:
    """What is computed otherwise than in TRL on purpose, in a line each where it matters to this file."""
    file, loss = recipe.file, recipe.file.get("trl.loss_type", "dapo")
    file.note("trl.reward_funcs", "an answer of which every reward is None is left out; in TRL it counts as 0")
    if narrow := [path for path, off in _NARROWING.items() if file.get(path, off[0]) not in off]:
        why = "logprobs are those of the tokens that may be sampled; TRL's are of the whole vocabulary"
        file.note(narrow[0], why)
    if file.get("trl.mask_truncated_completions") and loss in ("grpo", "dr_grpo"):
        why = f"with {loss} the loss is divided by the answers that are left; TRL counts the masked ones, too"
        file.note("trl.mask_truncated_completions", why)
    if file.get("trl.importance_sampling_level") == "sequence" and file.get("trl.beta") and _corrected(recipe):
        why = "use_bias_correction_kl weighs each token's KL by its own ratio; TRL by the sequence's"
        file.note("trl.importance_sampling_level", why)


_NARROWING = {"trl.top_p": (1.0,), "trl.top_k": (0, -1), "trl.min_p": (0.0,)}
"""Options that narrow what may be sampled, and their values that do not."""


def _rewards(recipe: Draft) -> None:
    file = recipe.file
    names: list[Json] = file.get("trl.reward_funcs", [])
    weights: list[Json] = file.get("trl.reward_weights", [1.0] * len(names))
    if not names:
        file.wrong("trl.reward_funcs", "name at least one function, such as rewards.accuracy_reward")
    if len(names) != len(weights):
        file.wrong(
            "trl.reward_weights", f"{len(names)} reward_funcs need {len(names)} weights, and there are {len(weights)}"
        )
        return
    models = 0
    for name, weight in zip(names, weights, strict=True):
        if not isinstance(name, str) or not name.strip():
            file.wrong("trl.reward_funcs", f"expected import paths and models, got {name!r}")
        elif names.count(name) > 1:
            file.wrong("trl.reward_funcs", f"{name} is given twice; add up its weights")
        elif _FUNCTION.match(name) and not Path(name).exists():
            played = {"kind": REWARD, "path": name, "weight": weight}
            recipe.put(("rewards", name), played if file.get("trl.rollout_func") else weight, "trl.reward_funcs")
        else:
            models += 1
            part = {"kind": "reward_model", "weight": weight, "model": name}
            recipe.put(("rewards", "reward_model" + (f"_{models}" if models > 1 else "")), part, "trl.reward_funcs")


def _sampling(recipe: Draft) -> None:
    file = recipe.file
    if "trl.max_completion_length" not in file:
        file.note("trl.max_completion_length", f"{LENGTH}, TRL's default")
    recipe.put("sampling.max_tokens", file.get("trl.max_completion_length", LENGTH), "trl.max_completion_length")
    for option in ("temperature", "top_p", "min_p", "repetition_penalty"):
        recipe.copy(f"trl.{option}", f"sampling.{option}")
    if "trl.top_k" in file:
        recipe.put("sampling.top_k", max(0, file.get("trl.top_k")), "trl.top_k")
    if file.get("trl.use_vllm"):
        recipe.copy("trl.vllm_guided_decoding_regex", "sampling.regex")
    # As in TRL, these come before the options that have names of their own.
    found = translated(file.get("trl.generation_kwargs", {}))
    for option, value in found.sampling.items():
        recipe.put(f"sampling.{option}", value, "trl.generation_kwargs")
    for why in found.notes:
        file.note("trl.generation_kwargs", why)
    for why in found.wrong:
        file.wrong("trl.generation_kwargs", why)


def _advantage(recipe: Draft) -> None:
    file = recipe.file
    usual = "normalize_then_sum" if file.get("rl") == "gdpo" else "sum_then_normalize"
    together = file.get("trl.multi_objective_aggregation", usual)
    scale = file.get("trl.scale_rewards", True)
    kinds = {"True": "grpo", "group": "grpo", "batch": "batch_std", "False": "dr_grpo", "none": "dr_grpo"}
    if str(scale) not in kinds:
        file.wrong("trl.scale_rewards", f"expected true, false, group, batch or none, got {scale!r}")
    if together == "normalize_then_sum":
        if scale not in (True, "group"):
            file.note("trl.scale_rewards", "changes nothing: normalize_then_sum standardises each reward by itself")
        recipe.put("advantage", "gdpo", "trl.multi_objective_aggregation", "rl")
    elif together != "sum_then_normalize":
        file.wrong(
            "trl.multi_objective_aggregation", f"expected sum_then_normalize or normalize_then_sum, got {together}"
        )
    else:
        recipe.put("advantage", kinds.get(str(scale), "grpo"), "trl.scale_rewards")


def _loss(recipe: Draft) -> None:
    file = recipe.file
    level, named = file.get("trl.importance_sampling_level", "token"), file.get("trl.loss_type", "dapo")
    if named not in REDUCTIONS:
        file.wrong("trl.loss_type", f"expected one of {', '.join(REDUCTIONS)}, got {named}")
    if level not in ("token", "sequence"):
        file.wrong("trl.importance_sampling_level", f"expected token or sequence, got {level}")
    clipless = named in ("cispo", "sapo")
    if clipless and level == "sequence":
        file.wrong("trl.importance_sampling_level", f"of {named} ratios are the token's; leave it out")
    kind = named if clipless else "gspo" if level == "sequence" else "grpo"
    recipe.put("loss.kind", kind, "trl.loss_type", "trl.importance_sampling_level")
    recipe.put("loss.reduction", REDUCTIONS.get(named, "token"), "trl.loss_type")
    if "trl.loss_type" not in file:
        file.note("trl.loss_type", "dapo, TRL's default")
    sampled = _against_the_sampler(recipe)
    if recipe.updates > 1:
        recipe.put("updates_per_batch", recipe.updates, "trl.num_iterations")
    elif file.get("trl.num_iterations", 1) < 1:
        file.wrong("trl.num_iterations", "it must be at least 1")
    _bounds_of_ratios(recipe, kind, recipe.updates > 1 or sampled)
    whence = ("trl.generation_batch_size", "trl.replay_buffer_size", "trl.vllm_importance_sampling_correction")
    recipe.put("old_logprobs", "sampled" if sampled else "recomputed", *whence)
    _corrections(recipe, sampled=sampled)


def _bounds_of_ratios(recipe: Draft, kind: str, differ: bool) -> None:
    """What epsilon and epsilon_high are to this loss; ``differ``: whether any ratio may be other than 1."""
    file = recipe.file
    low = file.get("trl.epsilon", 0.2)
    high = file.get("trl.epsilon_high", low)
    if kind == "cispo":
        recipe.put("loss.cap", high, "trl.epsilon_high", "trl.epsilon")
        if high < 1:
            text = f"{high:g} is the largest weight of a token under cispo, as in TRL, so that even tokens of ratio 1"
            file.note("trl.epsilon_high", f"{text} count {high:g} times; its authors take 5")
    elif kind != "sapo" and differ:
        recipe.put("loss.clip_low", low, "trl.epsilon")
        recipe.put("loss.clip_high", high, "trl.epsilon_high", "trl.epsilon")
        if kind == "grpo":
            recipe.put("loss.dual_clip", None, "trl.epsilon")
    read = {"cispo": ("trl.epsilon_high",) if "trl.epsilon_high" in file else ("trl.epsilon",)}.get(kind, ())
    unclipped = "with num_iterations 1 every ratio to the step's own policy is 1"
    why = f"{kind} does not clip" if kind in ("cispo", "sapo") else "" if differ else unclipped
    for option in ("trl.epsilon", "trl.epsilon_high"):
        if why and option in file and option not in read:
            file.note(option, f"changes nothing: {why}")


def _weighed(recipe: Draft) -> bool:
    """Whether corrections weigh how far the sampler was from the policy."""
    return bool(recipe.file.get("trl.use_vllm") and recipe.file.get("trl.vllm_importance_sampling_correction", True))


def _against_the_sampler(recipe: Draft) -> bool:
    """Whether ratios are to the logprobs that were sampled with.

    Only they tell how old an answer is that is replayed, or that was sampled together with those of earlier steps.
    """
    file, recompute, together = recipe.file, "trl.replay_recompute_logps", "trl.generation_batch_size"
    if recipe.generated > 1:
        file.note(together, f"{recipe.generated} steps are sampled together, and ratios are to the sampler's logprobs")
    if not file.get("trl.replay_buffer_size", 0):
        if not file.get(recompute, True):
            file.note(recompute, "changes nothing: nothing is replayed")
        return recipe.generated > 1
    if not _weighed(recipe):
        if file.get(recompute, True):
            why = "replayed answers are of an older policy, and no correction weighs that"
            file.note(recompute, f"ratios are to the sampler's logprobs: {why}")
        return True
    if not file.get(recompute, True):
        file.note(recompute, "ratios are to the sampler's logprobs, which are as old as the answer")
    return recipe.generated > 1 or not file.get(recompute, True)


def _again(recipe: Draft) -> None:
    """Groups that are trained again, and tasks that come again."""
    file, size = recipe.file, recipe.file.get("trl.replay_buffer_size", 0)
    if size:
        recipe.put("replay.size", size, "trl.replay_buffer_size")
        file.note("trl.replay_buffer_size", "groups are replayed for replay.max_age (8) steps at most")
    start, most = "trl.reroll_start_fraction", "trl.reroll_max_groups"
    if file.get(start, 1) != 1:
        recipe.copy(start, "reroll.start_fraction")
        recipe.copy(most, "reroll.max_groups")
    elif most in file:
        file.note(most, "changes nothing: reroll_start_fraction is 1, so no task comes again")


def _corrections(recipe: Draft, *, sampled: bool) -> None:
    """Weights for how far the sampler was from the policy: TRL has them with vLLM alone, OPSM always.

    Where ratios are to what was ``sampled`` with they hold those weights: then only what is out of bounds is left out.
    """
    file = recipe.file
    correction, mode = "trl.vllm_importance_sampling_correction", "trl.vllm_importance_sampling_mode"
    corrections: list[Json] = []
    if file.get("trl.use_vllm", False) and file.get(correction, True):
        asynchronous = _asynchronous(recipe)
        default = "token_truncate" if asynchronous else "sequence_mask"
        over, _, beyond = file.get(mode, default).partition("_")
        if over not in ("token", "sequence") or beyond not in ("truncate", "mask"):
            file.wrong(mode, "expected token_truncate, token_mask, sequence_truncate or sequence_mask")
            return
        low, high = _bounds(recipe)
        if sampled and beyond == "truncate":
            file.note(mode, f"{over}_truncate is left out: ratios to the sampler, clipped by epsilon, hold its weights")
        else:
            bounds = {} if low is None else {"low": low}
            corrections.append({"kind": over, "beyond": beyond, **bounds, "high": high})
        if mode not in file:
            file.note(mode, f"{default} with cap {high:g}, its default{' of the asynchronous trainer' * asynchronous}")
    else:
        why = (
            f"{correction} is false"
            if file.get("trl.use_vllm")
            else "the policy itself samples (trl.use_vllm is false)"
        )
        for option in (correction, mode, *_BOUNDS):
            if file.get(option):
                file.note(option, f"changes nothing: {why}")
    if "trl.off_policy_mask_threshold" in file:
        corrections.append({"kind": "opsm", "threshold": file.get("trl.off_policy_mask_threshold")})
    if corrections:
        recipe.put("corrections", corrections, mode, correction, "trl.off_policy_mask_threshold")


_BOUNDS = tuple(f"trl.vllm_importance_sampling_{name}" for name in ("cap", "clip_max", "clip_min"))
"""What bounds the weights, from above by an older and a newer name, and from below."""


def _bounds(recipe: Draft) -> tuple[float | None, float]:
    """Least and greatest weight."""
    file, (cap, most, least) = recipe.file, _BOUNDS
    if cap in file and most in file:
        file.wrong(cap, "vllm_importance_sampling_clip_max is its newer name; leave one of them out")
    return file.get(least), file.get(most, file.get(cap, 3.0))


def _asynchronous(recipe: Draft) -> bool:
    """True if Axolotl would train with its asynchronous trainer, which has defaults of its own."""
    return bool(recipe.file.get("trl.use_data_producer") or recipe.file.get("trl.async_prefetch"))


def _corrected(recipe: Draft) -> bool:
    """Whether the penalty has the ratio before it."""
    return bool(recipe.file.get("trl.use_bias_correction_kl", not _asynchronous(recipe)))


def _reference(recipe: Draft) -> None:
    file = recipe.file
    beta, moves = file.get("trl.beta", 0.0), file.get("trl.sync_ref_model", False)
    if not beta:
        for option in ("trl.sync_ref_model", "trl.use_bias_correction_kl"):
            if file.get(option):
                file.wrong(option, "it needs a penalty: set trl.beta above 0, or leave it out")
        return
    every = recipe.per_step(file.get("trl.ref_model_sync_steps", 64))
    recipe.put("reference.kind", "average" if moves else "start", "trl.sync_ref_model", "trl.beta")
    recipe.put("reference.beta", beta, "trl.beta")
    recipe.put("reference.ratio_corrected", _corrected(recipe), "trl.use_bias_correction_kl")
    if moves:
        recipe.put("reference.mixup", file.get("trl.ref_model_mixup_alpha", 0.9), "trl.ref_model_mixup_alpha")
        recipe.put("reference.every", every, "trl.ref_model_sync_steps")
    else:
        for option in ("trl.ref_model_mixup_alpha", "trl.ref_model_sync_steps"):
            if option in file:
                file.note(option, "changes nothing without sync_ref_model")
