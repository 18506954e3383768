"""Whole runs on a tiny random model: its reward rises, on policy and off, every weight and an adapter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiers import long_but

from tandem.config import loading as config
from tandem.trainer import assemble as run

pytestmark = pytest.mark.slow


def recipe(model: Path, runs: Path, **changes: Any) -> config.RunConfig:
    options: dict[str, Any] = {
        "model": str(model),
        "runs": str(runs),
        "name": "run",
        "steps": 50,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"number": 1.0, "learns.shaping:near": 1.0},
        "groups_per_step": 4,
        "group_size": 16,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 2},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "loggers": [],
        "threads": 1,
    }
    return config.from_options({**options, **changes}, [], Path("test")).config


def train(recipe: config.RunConfig) -> tuple[Path, list[dict[str, float]]]:
    folder = asyncio.run(run.train(recipe, resume=None))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return folder, [json.loads(line)["metrics"] for line in lines]


@pytest.mark.parametrize("max_lag", long_but([0, 2], 0))
@pytest.mark.parametrize(
    ("trainable", "lr"),
    [
        pytest.param({"kind": "full"}, 3e-3, id="full"),
        pytest.param({"kind": "lora", "rank": 16, "alpha": 64}, 5e-3, id="lora", marks=pytest.mark.long),
    ],
)
def test_reward_rises(tiny_model: Path, tmp_path: Path, trainable: dict[str, Any], lr: float, max_lag: int) -> None:
    """From about 0.04 by chance; a policy that has found the digits gets 0.4, one that adds gets 2."""
    changes = {"trainable": trainable, "max_lag": max_lag, "optimizer": {"kind": "adamw", "lr": lr}}
    _, steps = train(recipe(tiny_model, tmp_path, **changes))
    assert len(steps) == 50
    # Off policy a step may pass in which no group is finished, and then another with several.
    rewards = [step["reward"] for step in steps if "reward" in step]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.15
    assert last > 2 * first
    assert max(step["lag/max"] for step in steps) == max_lag
    assert all(step["groups/dropped_stale"] == 0 for step in steps)
    off_policy = max(step["logprob_gap/max"] for step in steps)
    assert off_policy < 1e-4 if max_lag == 0 else off_policy > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_without_learning_nothing_drifts(tiny_model: Path, tmp_path: Path, trainable: str, max_lag: int) -> None:
    """At a rate that is 0 in float32 engine and trainer agree on every token, and the weights keep every bit."""
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 100, "max_tokens": 24}
    changes = {"trainable": trainable, "max_lag": max_lag, "sampling": sampling, "micro_batch_tokens": 100}
    still = {"steps": 4, "optimizer": {"kind": "adamw", "lr": 1e-300}, "rewards": {"learns.shaping:letters": 1.0}}
    folder, steps = train(recipe(tiny_model, tmp_path, **changes, **still))
    assert all(step["kl_behavior"] < 1e-8 for step in steps)
    assert all(step["logprob_gap/max"] < 1e-4 for step in steps), "on no token at all"
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(step["micro_batches"] > 1 for step in steps)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({event["digest"] for event in events if event["event"] == "published"}) == 1
    if trainable == "full":
        before = load_file(tiny_model / "model.safetensors")
        after = load_file(next(folder.glob("checkpoints/*4/model")) / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)
