"""Two ranks whose weights are cut, and one vLLM engine of two workers: each rank writes its worker's slices."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny_model
from integration import vllm_runs as vllm
from nursery import Nursery
from safetensors.torch import load_file

from tandem.config.tree import render

pytestmark = [pytest.mark.slow, vllm.needs_engine]

WORKERS: dict[str, Any] = {"tensor_parallel_size": 2} if vllm.CUDA else {"tensor_parallel_size": 2, "args": {}}
"""On a CPU too each is a process of its own."""


def test_ranks_write_the_slices_of_their_workers(nursery: Nursery, tmp_path: Path) -> None:
    """Every publish is proven on the bytes of both workers; the run goes on from its checkpoint."""
    if vllm.CUDA and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    model = build_tiny_model(tmp_path / "tiny", head_dim=vllm.HEAD_DIM)
    cut = {"ranks": 2, "distributed": {"shard": "weights"}, "sync": "shared"}
    options = vllm.recipe(
        model, tmp_path / "runs", name="slices", steps=3, engine=vllm.engine(**WORKERS), trainable="full", **cut
    )
    recipe = tmp_path / "slices.yaml"
    recipe.write_text(render(options), encoding="utf-8")
    trained(nursery, tmp_path, recipe)
    run = tmp_path / "runs" / "slices"
    trained(nursery, tmp_path, run, "steps=4")
    published = vllm.published(run)
    assert sorted(published) == [1, 2, 3, 4]
    assert all(event["probe_gap"] <= vllm.GAP for event in published.values())
    assert len({event["digest"] for event in published.values()}) == 4, "every step moved the weights"
    vllm.same_logprobs(run)
    saved = load_file(run / "checkpoints/000004/model/model.safetensors")
    assert {name: tuple(t.shape) for name, t in saved.items()} == {
        name: tuple(t.shape) for name, t in load_file(model / "model.safetensors").items()
    }


def trained(nursery: Nursery, folder: Path, what: Path, *overrides: str) -> None:
    """A run that must end well."""
    source = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{source / 'tests'}", "OMP_NUM_THREADS": "1"}
    with nursery.start(["train", str(what), *overrides], cwd=folder, out=subprocess.PIPE, environment=env) as process:
        said, _ = process.communicate(timeout=540)
    assert process.returncode == 0, said
