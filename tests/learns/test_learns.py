"""Whole runs on a tiny random model: its reward rises, on policy and off, every weight and an adapter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem import config, run

pytestmark = pytest.mark.learns


def recipe(model: Path, runs: Path, **changes: Any) -> config.RunConfig:
    options: dict[str, Any] = {
        "model": str(model),
        "runs": str(runs),
        "name": "run",
        "steps": 30,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"number": 1.0, "learns.shaping:near": 1.0},
        "groups_per_step": 4,
        "group_size": 8,
        "sampling": {"max_tokens": 4},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "sinks": [],
        "threads": 1,
    }
    return config.from_options({**options, **changes}, [], Path("test")).config


def train(recipe: config.RunConfig) -> tuple[Path, list[dict[str, float]]]:
    folder = asyncio.run(run.train(recipe, resume=None))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return folder, [json.loads(line)["metrics"] for line in lines]


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("trains", [{"kind": "full"}, {"kind": "lora", "rank": 8}], ids=["full", "lora"])
def test_reward_rises(tiny_model: Path, tmp_path: Path, trains: dict[str, Any], max_lag: int) -> None:
    _, steps = train(recipe(tiny_model, tmp_path, trains=trains, max_lag=max_lag))
    rewards = [step["reward"] for step in steps]
    print([round(r, 2) for r in rewards])
    print([round(step["reward/number"], 2) for step in steps])
    print([round(step["lag/max"], 2) for step in steps], steps[-1])
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.5
    assert max(step["lag/max"] for step in steps) <= max_lag
