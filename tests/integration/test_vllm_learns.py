"""Reward rises through a real vLLM, by each way that weights travel while training goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from conftest import build_tiny_model
from integration.vllm_runs import CUDA, metrics, needs_engine, recipe

from tandem import config, run

pytestmark = [needs_engine, pytest.mark.learns, pytest.mark.slow]

FULL = {"trains": {"kind": "full"}, "optimizer": {"kind": "adamw", "lr": 3e-3}}
LORA = {"trains": {"kind": "lora", "rank": 16, "alpha": 64}, "optimizer": {"kind": "adamw", "lr": 5e-3}}
WAYS: dict[str, dict[str, Any]] = {
    "shared-full": {"sync": "shared", **FULL},
    "hotswap-lora": {"sync": "hotswap", **LORA},
    "broadcast-full": {"sync": "broadcast", **FULL},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are wide enough for vLLM's attention."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)


@pytest.mark.parametrize("way", WAYS)
def test_reward_rises(model: Path, tmp_path: Path, way: str) -> None:
    """From about 0.04 by chance; a policy that has found the digits gets 0.4."""
    changes = {
        "steps": 40,
        "rewards": {"number": 1.0, "learns.shaping:near": 1.0},
        "group_size": 16,
        "sampling": {"max_tokens": 2},
        "checkpoint": {"every": 100},
    }
    options = recipe(model, tmp_path, **{**changes, **WAYS[way]})
    folder = asyncio.run(run.train(config.from_options(options, [], Path(way)).config, resume=None))
    steps = list(metrics(folder).values())
    rewards = [step["reward"] for step in steps]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.15
    assert last > 2 * first
    assert all(step["probe_gap"] < (0.3 if CUDA else 1e-3) for step in steps)
