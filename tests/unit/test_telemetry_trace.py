"""Spans add up over a step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tandem.metrics import Sum
from tandem.observability import trace


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    trace.take()
    yield
    trace.take()


def test_spans_of_a_name_add_up_and_are_taken_once() -> None:
    for _ in range(2):
        with trace.span("seconds/pack"):
            time.sleep(0.01)
    taken = trace.take()
    assert set(taken) == {"seconds/pack"}
    assert isinstance(taken["seconds/pack"], Sum)
    assert 0.02 <= taken["seconds/pack"].value < 0.5
    assert trace.take() == {}


def test_open_spans_are_listed_outermost_first_and_count_when_they_end() -> None:
    with trace.span("seconds/step"), trace.span("seconds/optimizer"):
        assert [name for name, _ in trace.current()] == ["seconds/step", "seconds/optimizer"]
        assert trace.take() == {}
    assert set(trace.take()) == {"seconds/step", "seconds/optimizer"}
