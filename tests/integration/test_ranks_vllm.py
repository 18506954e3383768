"""Two ranks, each with a vLLM engine that samples from that rank's own weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny_model
from integration import vllm_runs as vllm
from nursery import Nursery
from support.tiers import long_but
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.config.tree import render

pytestmark = [pytest.mark.slow, vllm.needs_engine]


def wide_model(folder: Path) -> Path:
    """As the tiny one, but with matrices that are large enough to be divided among ranks."""
    tiny = build_tiny_model(folder / "tiny", head_dim=vllm.HEAD_DIM)
    plain = AutoModelForCausalLM.from_pretrained(tiny)
    plain.config.hidden_size, plain.config.intermediate_size = 128, 640
    torch.manual_seed(0)
    type(plain)(plain.config).float().save_pretrained(folder / "wide")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "wide")
    return folder / "wide"


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"trainable": {"kind": "lora", "rank": 8}},
    "merged": {"trainable": {"kind": "lora", "rank": 8, "merged": True}},
    "context": {"distributed": {"context_parallel": 2}},
}


@pytest.mark.parametrize("kind", long_but(list(KINDS), "full"))
def test_two_pairs_train_publish_and_prove(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    """Every publish is proven on both engines, so each holds what its rank has; of whole weights nothing is copied."""
    model = wide_model(tmp_path)
    options = vllm.recipe(model, tmp_path / "runs", name="pairs", steps=3, ranks=2, engine=vllm.engine(), **KINDS[kind])
    recipe = tmp_path / "pairs.yaml"
    recipe.write_text(render(options), encoding="utf-8")
    source = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{source / 'tests'}", "OMP_NUM_THREADS": "1"}
    with nursery.start(
        ["train", str(recipe)], cwd=tmp_path, out=subprocess.PIPE, environment=env, children=True
    ) as process:
        output, _ = process.communicate(timeout=540)
    assert process.returncode == 0, output
    run = tmp_path / "runs" / "pairs"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    published = [event for event in events if event["event"] == "published"]
    assert [event["step"] for event in published] == [1, 2, 3]
    assert all((event["bytes"] == 0) == (kind != "lora") for event in published)
    assert all(event["probe_gap"] is not None for event in published)
    assert len({event["digest"] for event in published}) == 3, "every step moved the weights"
    assert len(list((run / "logs").glob("*engine*"))) >= 2
