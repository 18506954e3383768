"""Families of models on a real vLLM: a tiny random one of each trains, proven, killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import _byte_tokenizer
from integration.vllm_runs import HEAD_DIM, Trainer, groups_once, metrics, needs_engine, published, same_logprobs
from support.families import FAMILIES, SIZES
from transformers import AutoConfig

from tandem.model import packing

pytestmark = [needs_engine, pytest.mark.long]

STEPS = 8
WAYS = [
    ("phi3", "shared"),
    ("qwen3_moe", "restart"),
    ("gpt_oss", "restart"),
    ("granite", "shared"),
    ("mixtral", "restart"),
    ("olmo2", "shared"),
]
"""By ``shared`` where vLLM only places tensors; experts it repacks for a processor. Its hybrids need bfloat16 there."""


def made(name: str, folder: Path) -> Path:
    """A tiny model whose heads are wide enough for vLLM's attention."""
    tokenizer, options = _byte_tokenizer(256), {**SIZES, **FAMILIES[name]}
    options |= {"vocab_size": len(tokenizer), "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    options |= {"head_dim": HEAD_DIM} if "head_dim" in options else {"hidden_size": 4 * HEAD_DIM}
    config = AutoConfig.for_model(name, **options, initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = packing.causal_class(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "sync"), WAYS, ids=map("-".join, WAYS))
def test_a_family_is_trained_proven_killed_and_resumed(name: str, sync: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "model")
    way = {"kind": sync, "every": 1} if sync == "restart" else sync
    steps = 3 if sync == "restart" else STEPS  # for each of which an engine is started
    run = Trainer.fresh(tmp_path, model, steps=steps, trainable={"kind": "full"}, sync=way)
    try:
        run.kill_between_publishes(1)
        resumed = Trainer(tmp_path, "runs/run")
        resumed.ended(seconds=800)
    finally:
        run.clean()
    assert set(metrics(run.folder)) == set(range(1, steps + 1))
    assert all(event["probe_gap"] is not None for event in published(run.folder).values())
    assert len({event["digest"] for event in published(run.folder).values()}) == len(published(run.folder))
    groups_once(run.folder, each=4)
    same_logprobs(run.folder)
