"""Paces of ranks: what they compute, without what they wait for, compared for the same work."""

from __future__ import annotations

import time

import pytest
import torch

from tandem.distributed.compute_clock import ComputeClock
from tandem.metrics import flatten
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
