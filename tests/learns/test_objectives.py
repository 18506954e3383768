"""Whole runs with other objectives than the default: the reward rises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from learns.test_learns import recipe, train

pytestmark = pytest.mark.long

OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05}, "advantage": "batch_std", "max_lag": 2},
    "cispo": {"loss": "cispo", "advantage": "gdpo", "max_lag": 2, "corrections": ["opsm"]},
    "sapo": {"loss": "sapo", "advantage": "rloo", "reference": {"kind": "average", "every": 10, "beta": 0.01}},
    "reinforce": {
        "loss": "reinforce",
        "advantage": "grpo",
        "max_lag": 2,
        "old_logprobs": "recomputed",
        "corrections": [{"kind": "token", "high": 2.0}],
        "optimizer": {"kind": "adamw", "lr": 1.5e-3},
    },
    "decoupled": {"old_logprobs": "recomputed", "updates_per_batch": 2, "optimizer": {"kind": "adamw", "lr": 2e-3}},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_reward_rises(tiny_model: Path, tmp_path: Path, name: str) -> None:
    _, steps = train(recipe(tiny_model, tmp_path, **OBJECTIVES[name]))
    rewards = [step["reward"] for step in steps if "reward" in step]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.15
    assert last > 2 * first
