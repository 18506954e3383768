"""Groups that are not trained on: said as they are dropped, in few lines, with an example and what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import answered, make_group

from tandem.observability.answers import DroppedGroups
from tandem.observability.emit import Telemetry
from tandem.observability.loggers.base import RunInfo
from tandem.observability.loggers.console import Console
from tandem.types import Group

Make = Callable[[int], Group]


def info(folder: Path, resumed_step: int = 0) -> RunInfo:
    return RunInfo(name="run", folder=folder, steps=10, config={}, resumed_step=resumed_step)


def hopeless(index: int) -> Group:
    return make_group(f"t{index}@0", [answered(f"t{index}@0/{i}", f"no idea {i}", 0.0) for i in range(4)], index=index)


def solved(index: int) -> Group:
    return make_group(f"t{index}@0", [answered(f"t{index}@0/{i}", f"right {i}", 1.0) for i in range(4)], index=index)


def cut(index: int) -> Group:
    long = [answered(f"t{index}@0/{i}", f"well {i}", 0.0, finish="length") for i in range(4)]
    return make_group(f"t{index}@0", long, index=index)


def alike(index: int) -> Group:
    return make_group(f"t{index}@0", [answered(f"t{index}@0/{i}", "same", 0.0) for i in range(4)], index=index)


def failed(index: int) -> Group:
    broken = replace(answered(f"t{index}@0/1", "said", None), status="error", error="ValueError: my reward broke")
    return make_group(f"t{index}@0", [answered(f"t{index}@0/0", "said", 1.0), broken], index=index)


def drop(
    folder: Path,
    make: Make = hopeless,
    count: int = 400,
    *,
    steps: int = 1,
    reason: str = "zero_variance",
    resumed: int = 0,
) -> list[dict[str, Any]]:
    """What is told of so many groups dropped for each step, of batches of four."""
    step = resumed
    with Telemetry(info(folder, resumed), [Console(live="never")]) as telemetry:
        dropped_groups = DroppedGroups(telemetry=telemetry, version=lambda: step, groups_per_step=4, max_tokens=64)
        for step in range(resumed, resumed + steps):  # noqa: B007 - read by version
            for index in range(count):
                dropped_groups(reason, make(index))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "groups_dropped"]


def test_the_first_is_told_and_five_batches_worth_are_warned_of(tmp_path: Path) -> None:
    events = drop(tmp_path)
    assert [event["dropped"] for event in events] == [1, 20]
    assert [event["warning"] for event in events] == [False, True]
    assert all(event["step"] == 1 for event in events)
    assert events[1]["why"] == {"every reward 0": 20}


def test_a_later_step_tells_of_another_kind(tmp_path: Path) -> None:
    assert [(event["step"], event["dropped"]) for event in drop(tmp_path, count=20, steps=3)] == [(1, 1), (1, 20)]
    step = 1
    with Telemetry(info(tmp_path, 3), [Console(live="never")]) as telemetry:
        groups = DroppedGroups(telemetry=telemetry, version=lambda: step, groups_per_step=4, max_tokens=64)
        for step, make, count in ((3, hopeless, 20), (4, solved, 20), (5, hopeless, 20)):  # noqa: B007 - read by version
            for index in range(count):
                groups("zero_variance", make(index))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    pairs = [(event["step"], event["dropped"]) for event in events if event["event"] == "groups_dropped"]
    assert pairs[2:] == [(4, 1), (4, 20), (5, 20)]


def test_the_console_shows_an_answer_its_reward_and_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop(tmp_path, count=20)
    lines = capsys.readouterr().out.splitlines()
    assert "step 1: 1 group dropped so far: 1 with every reward 0" in lines
    at = lines.index("WARNING step 1: 20 groups dropped so far: 20 with every reward 0")
    assert any(line.startswith("  change: read the answer: if it is right, mend the reward") for line in lines[at:])
    assert any("an answer of theirs, reward 0: task t19" in line for line in lines[at:])
    assert "  < no idea 0" in lines[at:]


@pytest.mark.parametrize(
    ("make", "reason", "change"),
    [
        (solved, "zero_variance", "harder tasks"),
        (cut, "zero_variance", "80 of 80 answers were cut at a length limit: raise sampling.max_tokens (64)"),
        (alike, "zero_variance", "raise sampling.temperature"),
        (failed, "failed", "ValueError: my reward broke"),
        (hopeless, "stale", "raise max_lag"),
    ],
)
def test_what_to_change_is_by_what_was_seen(tmp_path: Path, make: Make, reason: str, change: str) -> None:
    warning = next(event for event in drop(tmp_path, make, 20, reason=reason) if event["warning"])
    assert change in warning["change"]
