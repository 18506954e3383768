"""Several environments in one run: how batches are shared out, and each one's own order of tasks."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.sources import exactly
from tandem.rollout.measure import Solved
from tandem.rollout.mixture import MixtureSchedule
from tandem.rollout.source import Draw
from tandem.rollout.task_sampler import EnvRunner
from tandem.types import Task


def runner(
    name: str, weight: float = 1.0, min_share: float = 0.0, *, label: str = "", count: int = 5, seed: int = 7
) -> EnvRunner:
    tasks = [Task(id=f"t{n}", env="e", prompt=(), answer="") for n in range(count)]
    return EnvRunner(
        name=name,
        label=label,
        group_runner=cast("Any", None),
        tasks=tasks,
        solved=Solved(reward="mark", full_marks=1.0),
        seed=seed,
        weight=weight,
        min_share=min_share,
    )


def table(places: int, **shares: tuple[float, float]) -> MixtureSchedule:
    return MixtureSchedule([runner(name, *share) for name, share in shares.items()], places)


def totals(schedule: MixtureSchedule, batches: int) -> Counter[str]:
    return sum((Counter(schedule.counts(batch)) for batch in range(batches)), Counter())


def test_one_stream_has_every_place() -> None:
    schedule = table(3, only=(2.5, 0.0))
    assert [schedule.batch(n) for n in (7, 0)] == [["only"] * 3] * 2


def test_places_follow_the_weights_exactly_over_time_and_nearly_at_any_moment() -> None:
    schedule = table(4, a=(2.0, 0.0), b=(1.0, 0.0))
    assert [dict(schedule.counts(n)) for n in range(3)] == [{"a": 3, "b": 1}, {"a": 2, "b": 2}, {"a": 3, "b": 1}]
    assert totals(schedule, 300) == {"a": 800, "b": 400}
    tenth = table(1, a=(0.1, 0.0), b=(0.2, 0.0))
    assert totals(tenth, 3000) == {"a": 1000, "b": 2000}, "0.1 is a tenth, however long the run"


def test_a_least_share_is_in_every_batch_and_the_rest_follow_their_weights() -> None:
    schedule = table(10, a=(3.0, 0.0), b=(1.0, 0.0), c=(1.0, 0.5))
    assert {schedule.counts(n)["c"] for n in range(40)} == {5}
    assert totals(schedule, 40) == {"a": 150, "b": 50, "c": 200}


def test_a_least_share_below_one_place_holds_over_time() -> None:
    schedule = table(3, often=(1000.0, 0.0), seldom=(1.0, 0.25))
    assert totals(schedule, 100)["seldom"] == 75
    assert all(schedule.counts(n)["seldom"] <= 1 for n in range(100))


def test_a_least_share_is_what_a_person_wrote() -> None:
    assert math.floor(0.29 * 100) == 28, "why it is not a float"
    schedule = table(100, a=(1000.0, 0.0), b=(1.0, 0.29))
    assert schedule.counts(0)["b"] == 29


def test_the_places_of_a_stream_are_spread_over_its_batch() -> None:
    assert table(6, a=(2.0, 0.0), b=(1.0, 0.0)).batch(0) == ["a", "b", "a", "a", "b", "a"]


SHARES = st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 25)), min_size=1, max_size=4)


@pytest.mark.slow
@given(shares=SHARES, places=st.integers(1, 20))
def test_any_shares_fill_every_batch_keep_least_shares_and_add_up(
    shares: Sequence[tuple[float, int]], places: int
) -> None:
    streams = [runner(str(n), weight, least / 100) for n, (weight, least) in enumerate(shares)]
    schedule = MixtureSchedule(streams, places)
    so_far: Counter[str] = Counter()
    for number in range(30):
        counts = schedule.counts(number)
        assert sum(counts.values()) == places
        assert Counter(schedule.batch(number)) == Counter(dict(counts))
        so_far.update(counts)
        for one in streams:
            least = exactly(one.min_share)
            assert counts[one.name] >= math.floor(least * places)
            assert so_far[one.name] > least * places * (number + 1) - len(streams), "over time too"
    heavy = max(streams, key=lambda one: one.weight)
    if not any(one.min_share for one in streams):
        fair = exactly(heavy.weight) / sum((exactly(one.weight) for one in streams), start=Fraction(0)) * places * 30
        assert abs(so_far[heavy.name] - fair) < len(streams)


def test_the_number_of_a_batch_alone_decides() -> None:
    shares = {"a": (1.0, 0.0), "b": (1.7, 0.1), "c": (0.3, 0.0)}
    in_order = table(7, **shares)
    forward = [in_order.batch(n) for n in range(20)]
    assert [table(7, **shares).batch(n) for n in (19, 3)] == [forward[19], forward[3]]


def test_streams_of_one_environment_are_told_apart() -> None:
    one, other = runner("a", label="a/", count=50), runner("b", label="b/", count=50)
    ours, theirs = ([each.of(Draw("", n))[1] for n in range(50)] for each in (one, other))
    assert sorted(ours) == sorted(f"a/t{n}@0" for n in range(50))
    assert [id[2:] for id in ours] != [id[2:] for id in theirs], "each has an order of its own"
    assert one.of(Draw("", 60))[1].endswith("@1")
    assert one.of(Draw("", 3))[1] == ours[3], "going back to an epoch"
    assert [runner("a", label="a/", count=50, seed=8).of(Draw("", n))[1] for n in range(50)] != ours


@pytest.mark.parametrize("number", [0.1, 1e-07, 3.0, 0.29])
def test_numbers_are_read_as_they_are_written(number: float) -> None:
    assert exactly(number) == Fraction(str(number))


def test_a_sequence_of_tasks_may_be_as_long_as_python_allows() -> None:
    endless = replace(runner("sums"), tasks=cast("Any", range(sys.maxsize)))
    places = {endless.place(Draw("sums", number)) for number in range(100)}
    assert len(places) == 100
    assert sum(place > sys.maxsize // 2 for place in places) in range(30, 71)
