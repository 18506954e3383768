"""TRL's objective on given numbers: losses with gradients, importance weights, advantages, the moving reference.

Its own methods run, on a stand-in for the trainer; what it computes in the middle of a long method is cut out of its
source and run as it is. Everything in float64, so that the file holds more digits than float32 tells apart.

    bash benchmarks/peers/setup
    .venv-peers/bin/python tests/contract/trl_objective.py tests/contract/trl_objective.json

The suite compares Tandem with the file that this wrote; TRL is not needed there.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl.experimental.gspo_token import GRPOTrainer as TokenTrainer
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.callbacks import SyncRefModelCallback

LENGTHS = (6, 1, 3, 7, 2, 4, 5, 1)
"""Of the answers: two of one token among them."""
ADVANTAGES = (1.5, -0.5, -1.25, 0.75, 0.0, -2.0, 0.3, 2.0)
MAX_TOKENS = 7
METRICS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean")
OPTIONS: dict[str, Any] = {
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "loss_type": "grpo",
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
}
LOSSES: list[dict[str, Any]] = [
    *({"loss_type": kind, "delta": delta} for kind in ("grpo", "bnpo", "dr_grpo", "dapo") for delta in (None, 3.0)),
    {"loss_type": "grpo", "epsilon": 0.4, "epsilon_high": 0.1},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "sapo"},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    *(
        {"loss_type": kind, "importance_sampling_level": level, "epsilon": low, "epsilon_high": high}
        for level in ("sequence", "sequence_token")
        for kind in ("grpo", "dapo")
        for low, high in ((3e-4, 4e-4), (0.3, 0.3))
    ),
    *({"beta": 0.04, "use_bias_correction_kl": corrected} for corrected in (False, True)),
    {"beta": 0.5, "loss_type": "dapo", "use_bias_correction_kl": True, "delta": 3.0},
    *({"off_policy_mask_threshold": threshold} for threshold in (0.0, 0.1, 0.5)),
]
WEIGHTS: list[dict[str, Any]] = [
    {"mode": f"{level}_{beyond}", "min": low, "max": high}
    for level in ("token", "sequence")
    for beyond in ("truncate", "mask")
    for low, high in ((None, 3.0), (0.5, 2.0))
]
REWARDS: list[list[list[float]]] = [
    # Groups of four rollouts, two rewards each.
    [[1.0, 0.5], [0.0, 0.25], [0.0, 0.0], [1.0, 1.0]],
    [[0.0, 0.1], [0.0, 0.2], [0.0, 0.3], [0.0, 0.4]],
    [[1.0, 0.7], [1.0, 0.7], [1.0, 0.7], [1.0, 0.7]],
    [[-3.0, 9.0], [2.0, -8.0], [0.5, 0.0], [0.0, 4.0]],
]
REWARD_WEIGHTS = [1.0, 0.25]


def drawn() -> dict[str, list[list[float]]]:
    """Logprobs of the policy, of itself at the step's start, of the sampler and of a reference, per answer."""
    generator = torch.Generator().manual_seed(7)

    def noise(scale: float) -> list[Tensor]:
        return [torch.randn(n, generator=generator, dtype=torch.float64) * scale for n in LENGTHS]

    old = [-(x.abs() + 0.05) for x in noise(1.5)]
    policy = [a + b for a, b in zip(old, noise(0.35), strict=True)]
    policy[3][2] = old[3][2] + 2.5  # far beyond every clip, of either sign
    policy[5][1] = old[5][1] + 2.5
    policy[5][2] = old[5][2] - 3.0
    policy[0][4] = old[0][4] - 3.0
    sampler = [a + b for a, b in zip(old, noise(0.3), strict=True)]
    sampler[6][0] = old[6][0] - 4.0
    reference = [a + b for a, b in zip(old, noise(0.4), strict=True)]
    each = {"policy": policy, "old": old, "sampler": sampler, "reference": reference}
    # Rounded to what float32 holds: both sides start from the same numbers.
    return {name: [x.float().tolist() for x in rows] for name, rows in each.items()}


def padded(rows: list[list[float]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def stand_in(options: dict[str, Any], policy: Tensor) -> SimpleNamespace:
    """What the loss reads of a trainer."""
    gathered = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (policy, torch.zeros_like(policy), None),
        args=SimpleNamespace(**options, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=gathered,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        epsilon_low=options["epsilon"],
        get_off_policy_mask=grpo_trainer.GRPOTrainer.get_off_policy_mask,
        _metrics={"train": defaultdict(list)},
        **{name: value for name, value in options.items() if name not in ("epsilon", "use_bias_correction_kl")},
    )


def loss_of(changes: dict[str, Any], numbers: dict[str, list[list[float]]]) -> dict[str, Any]:
    options = {**OPTIONS, **changes}
    policy = padded(numbers["policy"]).requires_grad_()
    mask = torch.tensor([[1.0] * n + [0.0] * (max(LENGTHS) - n) for n in LENGTHS], dtype=torch.float64)
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": padded(numbers["old"]),
        "sampling_per_token_logps": padded(numbers["sampler"]),
        "ref_per_token_logps": padded(numbers["reference"]),
        "num_items_in_batch": mask.sum(),
    }
    trainer = TokenTrainer if options["importance_sampling_level"] == "sequence_token" else grpo_trainer.GRPOTrainer
    instance = stand_in(options, policy)
    loss = trainer._compute_loss(instance, None, inputs)
    loss.backward()
    assert policy.grad is not None
    grad = [row[:n].tolist() for row, n in zip(policy.grad, LENGTHS, strict=True)]
    metrics = {name: values[-1] for name, values in instance._metrics["train"].items() if name in METRICS}
    return {"options": options, "loss": loss.item(), "grad": grad, "metrics": metrics}


def cut(module: Any, method: str, first: str, last: str) -> str:
    """Statements of a method of the module's trainer, from the first that begins so to the last that does."""
    cls = next(thing for name, thing in vars(module).items() if name in ("GRPOTrainer", "RLOOTrainer"))
    source = textwrap.dedent(inspect.getsource(getattr(cls, method)))
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(body, list):
                continue
            texts = [ast.unparse(statement) for statement in body]
            starts = [i for i, text in enumerate(texts) if text.startswith(first)]
            ends = [i for i, text in enumerate(texts) if text.startswith(last)]
            if starts and ends:
                return "\n".join(texts[starts[0] : ends[-1] + 1])
    raise SystemExit(f"{module.__name__} has no statements from {first!r} to {last!r}; is it another release?")


def weights_of(options: dict[str, Any], numbers: dict[str, list[list[float]]]) -> dict[str, Any]:
    code = cut(
        grpo_trainer,
        "_generate_and_score_completions",
        "mask = completion_mask if tool_mask is None",
        "if self.vllm_importance_sampling_mode in",
    )
    mask = torch.tensor([[1.0] * n + [0.0] * (max(LENGTHS) - n) for n in LENGTHS], dtype=torch.float64)
    space: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "completion_mask": mask,
        "tool_mask": None,
        "old_per_token_logps": padded(numbers["old"]),
        "sampling_per_token_logps": padded(numbers["sampler"]),
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=options["mode"],
            vllm_importance_sampling_clip_min=options["min"],
            vllm_importance_sampling_clip_max=options["max"],
        ),
    }
    exec(code, space)
    ratios = space["vllm_importance_sampling_ratio"].expand_as(mask)
    return {"options": options, "weights": [row[:n].tolist() for row, n in zip(ratios, LENGTHS, strict=True)]}


def advantages_of(kind: str) -> list[float]:
    """Of every rollout of REWARDS."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64).flatten(0, 1)
    module: Any = grpo_trainer
    options: dict[str, Any] = {"scale_rewards": kind, "multi_objective_aggregation": "sum_then_normalize"}
    if kind == "gdpo":
        options["multi_objective_aggregation"] = "normalize_then_sum"
    if kind == "rloo":
        module, options = rloo_trainer, {"normalize_advantages": False, "reward_clip_range": None, "beta": 0.0}
    code = cut(module, "_generate_and_score_completions", "unscorable_mask =", "advantages = torch.nan_to_num")
    space: dict[str, Any] = {
        **vars(module),
        "rewards_per_func": rewards,
        "num_generations": len(REWARDS[0]),
        "device": "cpu",
        "mode": "train",
        "self": SimpleNamespace(
            reward_weights=torch.tensor(REWARD_WEIGHTS, dtype=torch.float64), reward_funcs=[None, None], **options
        ),
    }
    exec(code, space)
    values: list[float] = space["advantages"].tolist()
    return values


def moved_reference() -> dict[str, Any]:
    """One update of the moving reference."""
    model, reference = (torch.nn.Linear(3, 2, bias=False, dtype=torch.float64) for _ in range(2))
    for weight, start in ((model.weight, 1.0), (reference.weight, -4.0)):
        weight.data = torch.arange(6.0, dtype=torch.float64).view(2, 3) * 0.37 + start
    before = reference.weight.tolist()
    SyncRefModelCallback._sync_target_model(model, reference, 0.6)
    return {"alpha": 0.6, "policy": model.weight.tolist(), "before": before, "after": reference.weight.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    numbers = drawn()
    kinds = ("group", "none", "batch", "gdpo", "rloo")
    results = {
        "trl": trl.__version__,
        "max_tokens": MAX_TOKENS,
        "logprobs": numbers,
        "advantages": list(ADVANTAGES),
        "losses": [loss_of(changes, numbers) for changes in LOSSES],
        "weights": [weights_of(options, numbers) for options in WEIGHTS],
        "rewards": {"groups": REWARDS, "weights": REWARD_WEIGHTS},
        "group_advantages": {kind: advantages_of(kind) for kind in kinds},
        "moving_reference": moved_reference(),
    }
    lines = [f"{json.dumps(key)}: {_wrapped(value)}" for key, value in results.items()]
    output.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _wrapped(value: Any) -> str:
    """One line for each entry of a list, so that a change shows where it is."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
    return json.dumps(value)


if __name__ == "__main__":
    main()
