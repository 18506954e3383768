"""What is known of a run's tasks before anything is played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.loading import from_options
from tandem.errors import ConfigError
from tandem.model.policy import load_config
from tandem.trainer import environments


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_that_were_rendered_already_are_told(tmp_path: Path, tiny_model: Path, chat: bool) -> None:
    texts = [f"<|im_start|>user\n{n} + 1<|im_end|>\n<|im_start|>assistant\n<think>" for n in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    data = {"kind": "dataset", "path": str(tmp_path / "a.jsonl"), "answer": "", "test_share": 0, "chat": chat}
    options = {"model": str(tiny_model), "steps": 1, "env": data, "rewards": {"number": 1.0}}
    config = from_options(options, (), Path("a test")).config
    tasks = {"train": environments.tasks(config, "train")}
    model = load_config(config.model)
    if chat:
        with pytest.raises(ConfigError, match=r"dataset were rendered by a chat template already: .*chat: false"):
            environments.longest_prompt(config, model, tasks["train"])
    else:
        assert environments.longest_prompt(config, model, tasks["train"]) > len("3 + 1")


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
