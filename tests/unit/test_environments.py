"""What is known of a run's tasks before anything is played."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.loading import from_options
from tandem.model.policy import load_config
from tandem.trainer import environments


@pytest.mark.parametrize(("context", "warned"), [(64, True), (1024, False)])
def test_a_context_that_cuts_answers_before_max_tokens_does_is_warned_of(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, context: int, warned: bool
) -> None:
    options = {"model": str(tiny_model), "steps": 1, "env": {"kind": "arithmetic", "prompt": "{expression}="}}
    config = from_options(options | {"context": context, "sampling": {"max_tokens": 100}}, (), Path("a test")).config
    tasks = {"train": environments.tasks(config, "train")}
    longest = environments.longest_prompt(config, load_config(config.model), tasks["train"])
    expected = f"a prompt of {longest} tokens in a context of 64 leaves {64 - longest} for answers, fewer than "
    assert (expected in caplog.text) == warned
    assert ("longer answers are cut there" in caplog.text) == warned
