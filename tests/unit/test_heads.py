"""Heads that a recipe's processes cannot share are refused before weights load, by check and at the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, MambaConfig, Qwen2Config

from tandem.config.loading import RunConfig, load
from tandem.errors import ConfigError
from tandem.trainer.ranks.layout import check_model_heads

TWELVE = Qwen2Config(hidden_size=96, intermediate_size=64, num_attention_heads=12, num_key_value_heads=4)
VLLM = ("engine=vllm", "sync=broadcast")


def recipe(folder: Path, *options: str) -> RunConfig:
    (folder / "recipe.yaml").write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    return load(folder / "recipe.yaml", options).config


@pytest.mark.parametrize(("model", "options", "message"), [
    (TWELVE, ("ranks=6", "distributed.context_parallel=6"), "distributed.context_parallel: 6 processes cannot share "
     "12 query heads and 4 key/value heads; use one of 1, 2, 4, 12"),
    (TWELVE, (*VLLM, "engine.tensor_parallel_size=3"), "engine.tensor_parallel_size: 3 processes cannot share "
     "12 query heads and 4 key/value heads; use one of 1, 2, 4, 12"),
    (TWELVE, (*VLLM, "engine.tensor_parallel_size=8"), "engine.tensor_parallel_size: 8 processes"),
    (GPT2Config(n_head=9, n_embd=72), (*VLLM, "engine.tensor_parallel_size=2"), "9 query heads and 9 key/value heads; "
     "use one of 1, 3, 9"),
])  # fmt: skip
def test_heads_that_processes_cannot_share_are_refused(
    tmp_path: Path, model: Any, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_model_heads(recipe(tmp_path, *options), model)


@pytest.mark.parametrize(("model", "options"), [
    (TWELVE, ()),
    (TWELVE, ("ranks=12", "distributed.context_parallel=12")),  # each key head on three ranks
    (TWELVE, (*VLLM, "engine.tensor_parallel_size=4")),
    (TWELVE, (*VLLM, "engine.urls=[http://h:1]")),
    (MambaConfig(), (*VLLM, "engine.tensor_parallel_size=3")),  # it has no heads
])  # fmt: skip
def test_heads_that_processes_can_share_pass(tmp_path: Path, model: Any, options: tuple[str, ...]) -> None:
    check_model_heads(recipe(tmp_path, *options), model)
