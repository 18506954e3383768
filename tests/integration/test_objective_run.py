"""Whole runs with every part of the objective: they learn what they are told, and resume to the bit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.config import loading as config
from tandem.trainer import assemble as run

EVERYTHING: dict[str, Any] = {
    "advantage": "gdpo",
    "loss": {"kind": "gspo", "clip_low": 0.01, "clip_high": 0.01},
    "old_logprobs": "recomputed",
    "corrections": [{"kind": "token", "high": 1.5}, "opsm"],
    "reference": {"kind": "average", "every": 2, "mixup": 0.5, "beta": 0.05},
    "updates_per_batch": 2,
}
LIGHT: dict[str, Any] = {
    "advantage": "batch_std",
    "loss": "cispo",
    "reference": {"kind": "start", "beta": 0.05},
}
OF_THE_OBJECTIVE = (
    "loss",
    "ratio",
    "clip_fraction",
    "kl_",
    "ess",
    "correction",
    "reused",
    "grad_norm",
    "lr",
    "advantage",
)


def recipe(model: Path, runs: Path, name: str, **changes: Any) -> config.RunConfig:
    options: dict[str, Any] = {
        "model": str(model),
        "runs": str(runs),
        "name": name,
        "steps": 6,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"number": 1.0, "learns.shaping:letters": 0.5},
        "groups_per_step": 2,
        "group_size": 4,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 6},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "dtype": "float32",
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 3},
        "loggers": [],
        "threads": 1,
    }
    return config.from_options({**options, **changes}, [], Path("test")).config


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    every = [json.loads(line)["metrics"] for line in lines]
    return [{k: v for k, v in each.items() if k.startswith(OF_THE_OBJECTIVE)} for each in every]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoints" / "000006").rglob("*.safetensors"))
    return {f"{file.name}:{k}": v for file in files for k, v in load_file(file).items()}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(EVERYTHING, id="everything"),
        pytest.param(
            {**EVERYTHING, "trainable": {"kind": "lora", "rank": 2, "merged": True}},
            id="merged",
            marks=pytest.mark.long,
        ),
        pytest.param({**LIGHT, "trainable": "lora"}, id="light", marks=pytest.mark.long),
    ],
)
def test_three_steps_and_three_more_are_six(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    through = recipe(tiny_model, tmp_path, "through", **changes)
    whole = asyncio.run(run.train(through, resume=None))
    half = recipe(tiny_model, tmp_path, "halves", **{**changes, "steps": 3})
    folder = asyncio.run(run.train(half, resume=None))
    asyncio.run(run.train(dataclasses.replace(half, steps=6), resume=folder))
    want, resumed = tensors(whole), tensors(folder)
    assert want.keys() == resumed.keys()
    assert any(name.startswith("reference") for name in want) == ("updates_per_batch" in changes)
    for name, tensor in want.items():
        assert torch.equal(tensor, resumed[name]), name
    assert metrics(folder) == metrics(whole)
    assert len(metrics(whole)) == 6


def test_what_a_run_tells_of_its_objective(tiny_model: Path, tmp_path: Path) -> None:
    steps = metrics(asyncio.run(run.train(recipe(tiny_model, tmp_path, "run", **EVERYTHING), resume=None)))
    for row in steps:
        assert row["ess"] == pytest.approx(1.0, abs=1e-3)
        assert row["ratio/max"] == 1.0, "the first update is against itself"
        assert row["correction/weight"] == pytest.approx(1.0, abs=1e-3)
        assert row["reused/ratio/max"] > 1.0
        assert {"correction/masked", "correction/ess", "kl_reference", "reused/grad_norm"} <= row.keys()
    assert steps[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert steps[1]["kl_reference"] > 1e-6


@pytest.mark.long
def test_a_strong_penalty_holds_the_policy(tiny_model: Path, tmp_path: Path) -> None:
    ended = {}
    for beta in (1e-4, 10.0):
        changes = {"reference": {"kind": "start", "beta": beta}, "loss": "reinforce", "optimizer": {"lr": 1e-3}}
        folder = asyncio.run(run.train(recipe(tiny_model, tmp_path, f"beta{beta}", **changes), resume=None))
        ended[beta] = metrics(folder)[-1]["kl_reference"]
    assert ended[10.0] < ended[1e-4] / 2
