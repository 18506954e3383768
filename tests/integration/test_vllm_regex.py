"""Answers that a grammar of vLLM's holds to a regular expression."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from conftest import build_tiny_model
from integration.vllm_runs import HEAD_DIM, metrics, needs_engine, recipe, rollouts

from tandem.config.loading import from_options
from tandem.trainer import assemble as run

pytestmark = [needs_engine, pytest.mark.long]

REGEX = r"Sum: [a-z]{1,3}!"


def test_answers_match_and_what_was_forced_is_not_trained(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    sampling = {"max_tokens": 24, "regex": REGEX}
    options = recipe(tmp_path / "tiny", tmp_path, sampling=sampling, old_logprobs="recomputed", steps=2)
    options["loss"] = {"kind": "grpo", "reduction": "token"}
    config = from_options(options, (), Path("test")).config
    asyncio.run(run.train(config, resume=None))
    folder = tmp_path / "run"
    assert list(metrics(folder)) == [1, 2]
    rows = rollouts(folder)
    assert all(re.fullmatch(REGEX, row["text"]) for row in rows), [row["text"] for row in rows]
    for step, numbers in metrics(folder).items():
        tokens = [token for row in rows if row["step"] == step for token in row["tokens"]]
        free = [token for token in tokens if token["lp"] < 0]
        assert len(tokens) - len(free) >= 16 * len("Sum: ")  # a byte is a token
        assert 0 < numbers["tokens/trained"] <= len(free)
