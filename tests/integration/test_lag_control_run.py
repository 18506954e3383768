"""A whole run whose lag is chosen: it is told, bounded, and gone on with."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

from tandem.config import loading as config
from tandem.trainer import assemble as run

MOST = 2
GROUPS = 2


def recipe(model: Path, runs: Path, **changes: Any) -> config.RunConfig:
    options: dict[str, Any] = {
        "model": str(model),
        "runs": str(runs),
        "name": "auto",
        "steps": 4,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "groups_per_step": GROUPS,
        "group_size": 4,
        "zero_variance_groups": "keep",
        "max_lag": "auto",
        "lag_control": {"max_lag": MOST, "ess_floor": 0.999},
        "rewards": {"learns.shaping:letters": 1.0},
        "sampling": {"max_tokens": 6},
        "optimizer": {"kind": "adamw", "lr": 3e-2},  # so much that a step's lag is seen in the ratios
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 2},
        "loggers": [],
        "threads": 1,
    }
    return config.from_options({**options, **changes}, [], Path("test")).config


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_lag_is_told_held_within_the_budget_and_gone_on_with(tiny_model: Path, tmp_path: Path) -> None:
    run_config = recipe(tiny_model, tmp_path)
    folder = asyncio.run(run.train(run_config, resume=None))
    changes = [event for event in lines(folder / "events.jsonl") if event["event"] == "lag_changed"]
    assert changes[0]["reason"] == "ess"
    assert changes[0]["was"] == GROUPS
    assert changes[0]["ahead"] == GROUPS // 2
    assert changes[0]["ess"] < 0.999
    measured = [row["metrics"] for row in lines(folder / "metrics.jsonl")]
    assert measured[0]["lag_control/groups_ahead"] == GROUPS
    assert measured[changes[0]["step"]]["lag_control/groups_ahead"] == GROUPS // 2
    assert all(row["engine/idle_seconds"] >= 0 for row in measured)

    state = folder / "checkpoints" / "000004" / "state.json"
    saved = json.loads(state.read_text())
    saved["rate"] = {"ahead": MOST * GROUPS, "settling": 9, "why": "ess"}  # it stays there for the steps to come
    state.write_text(json.dumps(saved))
    asyncio.run(run.train(dataclasses.replace(run_config, steps=8), resume=folder))
    measured = [row["metrics"] for row in lines(folder / "metrics.jsonl")]
    assert [row["lag_control/groups_ahead"] for row in measured[4:]] == [MOST * GROUPS] * 4
    assert [row["lag_control/lag"] for row in measured[4:]] == [MOST] * 4
    trained = [row for path in sorted((folder / "rollouts").glob("*.jsonl")) for row in lines(path)]
    lags = [row["step"] - 1 - row["versions"][0] for row in trained]
    assert max(lags) == MOST
    assert json.loads((folder / "checkpoints" / "000008" / "state.json").read_text())["rate"]["settling"] == 5
