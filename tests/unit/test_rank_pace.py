"""Paces of ranks: what they compute, without what they wait for, compared for the same work."""

from __future__ import annotations

import time

import pytest
import torch

from tandem.distributed.compute_clock import ComputeClock
from tandem.metrics import flatten
from tandem.observability.alarms.watch import AlarmWatch
from tandem.trainer.rank_pace import paces


def test_the_same_seconds_for_more_work_are_faster() -> None:
    metrics = flatten(paces([2.0, 2.0, 3.0, 0.0], [200.0, 100.0, 100.0, 0.0]))
    assert [metrics[f"ranks/slowdown/{rank}"] for rank in range(3)] == [0.5, 1.0, 1.5]
    assert metrics["ranks/slowdown"] == 1.5
    assert "ranks/slowdown/3" not in metrics, "it had no micro-batch"
    assert metrics["ranks/compute_seconds/2"] == 3.0


def test_ranks_without_work_or_time_have_no_pace() -> None:
    assert flatten(paces([0.0, 0.0], [0.0, 0.0])).keys() == {f"ranks/compute_seconds/{rank}" for rank in range(2)}
    assert "ranks/slowdown" not in flatten(paces([0.0, 0.0], [1.0, 1.0]))


def test_the_clock_leaves_out_waits_and_what_is_around_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = ComputeClock(torch.device("cpu"))
    for _ in range(2):
        with clock.computing():
            now[0] += 3.0
            with clock.waiting():
                now[0] += 10.0
        with clock.waiting():  # of a round in which this rank has nothing to compute
            now[0] += 100.0
    assert clock.take() == 6.0
    assert clock.take() == 0.0


def test_a_straggler_is_over_once_it_keeps_up() -> None:
    watch, notices = AlarmWatch({}), []
    for step in range(1, 61):
        slow = 1.2 if 5 <= step < 30 else 1.0
        row = {"ranks/slowdown/0": 1.0, "ranks/slowdown/1": slow, "ranks/slowdown/2": 0.9, "ranks/slowdown": slow}
        notices += [(notice.step, notice.finding) for notice in watch.step(step, row) if notice.alarm == "stragglers"]
    (begin, finding), (end, over) = notices
    assert (begin, end, over) == (24, 39, None)
    assert finding is not None
    assert finding.seen.startswith("rank 1 takes 1.2 times the median rank's time")
    assert "steps 5–24" in finding.seen
