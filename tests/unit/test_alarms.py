"""Alarms over series of metrics: what goes wrong is named soon, and of runs that are well nothing is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from support.alarms import BASE, HEALTHY, ONSET, SICK, flat, slope, watched
from support.tiers import long_but

from tandem.observability.alarms import METRICS, PATTERNS, AlarmWatch, Name, Notice, _Episode

SOON = 20
"""Steps after its onset within which everything that goes wrong is named."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", long_but(range(4), 0))
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_told_of_a_healthy_run(name: str, seed: int) -> None:
    assert [(n.alarm, n.step, n.seen) for n in watched(HEALTHY[name], 200, seed)] == []


RECORDED = {"groups_per_step": 4, "group_size": 8, "rewards": {"number": {"weight": 1.0}}, "optimizer": {"lr": 2e-5}}


def recorded() -> list[dict[str, Any]]:
    """SmolLM2-135M in bfloat16 learning sums of three numbers, 40 steps on a busy machine; a group of four is noise."""
    path = Path(__file__).with_name("smollm2_sums.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_nothing_is_told_of_a_recorded_run() -> None:
    watch = AlarmWatch(RECORDED)
    assert [notice for row in recorded() for notice in watch.step(row["step"], row["metrics"])] == []


def planted(row: dict[str, Any], **metrics: float) -> dict[str, float]:
    """A recorded step with some numbers times something from step 20 on."""
    factors = metrics if row["step"] >= 20 else {}
    return {name: value * factors.get(name, 1.0) for name, value in row["metrics"].items()}


@pytest.mark.parametrize(
    ("alarm", "metrics"),
    [
        ("length", {"length": 3.0, "reward/number": 0.5, "accuracy": 0.5}),
        ("entropy", {"entropy": 0.02, "reward/number": 0.5, "accuracy": 0.5}),
        ("kl_behavior", {"kl_behavior": 300.0}),
    ],
)
def test_what_is_planted_in_a_recorded_run_is_named(alarm: str, metrics: dict[str, float]) -> None:
    watch = AlarmWatch(RECORDED)
    notices = [notice for row in recorded() for notice in watch.step(row["step"], planted(row, **metrics))]
    assert alarm in {notice.alarm for notice in notices}
    assert all(notice.step >= 20 for notice in notices)


@pytest.mark.slow
@pytest.mark.parametrize("seed", long_but(range(4), 0))
@pytest.mark.parametrize("name", SICK)
def test_what_goes_wrong_is_named_within_twenty_steps(name: str, seed: int) -> None:
    alarm, made = SICK[name]
    notices = watched(made, ONSET + SOON, seed)
    named = [notice for notice in notices if notice.alarm == alarm]
    assert named, f"told instead: {[(n.alarm, n.step) for n in notices]}"
    assert all(notice.step >= ONSET for notice in notices), [(n.alarm, n.step, n.seen) for n in notices]
    assert any(character.isdigit() for character in named[0].seen)
    assert named[0].means.endswith(".")
    assert named[0].change.endswith(".")


def test_every_alarm_is_looked_for_and_has_a_name_that_recipes_know() -> None:
    assert set(METRICS) == {pattern.alarm for pattern in PATTERNS} == set(get_args(Name))
    assert {alarm for alarm, _ in SICK.values()} == set(get_args(Name))


def lasting(count: int, **alarms: Any) -> tuple[AlarmWatch, list[Notice]]:
    """Answers that get short at step 40 and stay so until step 400."""
    made = replace(BASE, length=lambda step: 4.0 if ONSET <= step < 400 else 150.0, accuracy=flat(0.4))
    watch = AlarmWatch({**made.recipe(), "alarms": alarms})
    return watch, [notice for step, row in made.steps(count) for notice in watch.step(step, row)]


def test_an_episode_is_told_once_and_is_over_when_nothing_shows_any_more() -> None:
    _, notices = lasting(90)
    assert [notice.alarm for notice in notices] == ["length"]
    assert ONSET <= notices[0].since <= notices[0].step <= ONSET + SOON


def test_ignored_alarms_are_not_looked_for() -> None:
    watch, notices = lasting(90, ignore=["length"])
    assert notices == []
    assert watch.scalars() == {"alarms": 0.0}


def test_how_much_of_the_policy_a_grammar_allows_is_no_disagreement_with_the_engine() -> None:
    """As SmolLM2-135M has them that is held to a number, before it has learned the form and after."""
    made = replace(BASE, kl=slope(0.8, 0.05, 40))
    assert {notice.alarm for notice in watched(made, 60)} == {"kl_behavior"}
    assert watched(replace(made, config={"sampling": {"max_tokens": 512, "regex": "[0-9]+"}}), 60) == []


def test_stop_is_asked_for_by_the_first_alarm_and_by_one_that_is_open_after_a_resume() -> None:
    watch, notices = lasting(60, action="stop")
    assert watch.ended is not None
    assert (watch.ended.alarm, watch.ended.step) == ("length", notices[0].step)
    warned, _ = lasting(60, action="warn")
    assert warned.ended is None
    made = replace(BASE, length=lambda step: 4.0 if step >= ONSET else 150.0)
    rows = [{"step": step, "metrics": row} for step, row in made.steps(61)]
    stopped: list[int] = []
    resumed = AlarmWatch({**made.recipe(), "alarms": {"action": "stop"}})
    resumed.stop = lambda: stopped.append(1)
    resumed.replay(rows[:60])
    assert stopped == []
    resumed.step(61, rows[60]["metrics"])
    assert stopped == [1]


def test_an_alarm_that_comes_and_goes_is_one_that_stays() -> None:
    """Nine steps with the pattern and fifteen without, again and again: its episodes grow into each other."""
    episode, raised = _Episode("length"), 0
    for step in range(240):
        notice = episode.update((PATTERNS[0], "s") if step % 24 < 9 else None, step)
        raised += notice is not None and notice.seen == "s"
    assert raised == 2  # then it is over after 20 steps, which never come
