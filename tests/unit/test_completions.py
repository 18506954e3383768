"""What the policy wrote, as people are shown it: which answers, when, how much of them, and where."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import answered, make_group

from tandem.config.loading import from_options
from tandem.errors import ConfigError
from tandem.observability.answers import PrintCompletions
from tandem.observability.emit import Telemetry
from tandem.observability.loggers.base import RunInfo
from tandem.observability.loggers.console import Console
from tandem.types import Group


def groups() -> list[Group]:
    rollouts = [answered(f"t{task}@0/{i}", f"said {task}.{i}", i / 4) for task in (0, 1) for i in range(4)]
    return [make_group("t0@0", rollouts[:4]), make_group("t1@0", rollouts[4:])]


def events_of(folder: Path, options: PrintCompletions, steps: int = 20) -> list[dict[str, Any]]:
    """Every event of a run whose steps all train the same groups."""
    with Telemetry(RunInfo(name="run", folder=folder, steps=steps, config={}), [Console(live="never")]) as telemetry:
        show = partial(options.show, telemetry)
        for step in range(1, steps + 1):
            show(step, groups(), {})
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_an_answer_is_shown_after_the_first_step_and_every_few_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = events_of(tmp_path, PrintCompletions(every=5))
    assert [event["step"] for event in events] == [1, 5, 10, 15, 20]
    assert all(event["event"] == "completions" and len(event["samples"]) == 1 for event in events)
    lines = capsys.readouterr().out.splitlines()
    sample = events[0]["samples"][0]
    assert any(line.startswith(f"answer at step 1, reward {sample['reward']:.4g}: task t") for line in lines)
    assert "  > ?" in lines
    assert f"  < {sample['text']}" in lines
    assert len(lines) < 40, "a few lines for each"


def test_the_recipe_says_how_often_by_a_number_or_a_mapping() -> None:
    def read(setting: Any) -> PrintCompletions:
        options = {"model": "m", "steps": 1, "env": "arithmetic", "print_completions": setting}
        return from_options(options, (), Path("r.yaml")).config.print_completions

    assert read(3) == PrintCompletions(every=3)
    assert read({"every": 2, "count": None}) == PrintCompletions(every=2, count=None)
    for wrong in (-1, {"count": 0}, {"every": 0, "count": 2}):
        with pytest.raises(ConfigError, match="print_completions"):
            read(wrong)
