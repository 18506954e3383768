"""Spans add up over a step."""

from __future__ import annotations

import threading
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


def test_a_span_counts_though_its_block_raises() -> None:
    with pytest.raises(KeyError), trace.span("seconds/sync"):
        raise KeyError
    assert "seconds/sync" in trace.take()
    assert trace.current() == []


def test_open_spans_are_listed_outermost_first_and_count_when_they_end() -> None:
    with trace.span("seconds/step"), trace.span("seconds/optimizer"):
        assert [name for name, _ in trace.current()] == ["seconds/step", "seconds/optimizer"]
        assert trace.take() == {}
    assert set(trace.take()) == {"seconds/step", "seconds/optimizer"}


def test_a_function_can_be_a_span() -> None:
    @trace.span("seconds/pack")
    def work() -> int:
        return 3

    assert work() == 3
    assert work() == 3
    assert "seconds/pack" in trace.take()


def test_threads_do_not_lose_time() -> None:
    def work() -> None:
        for _ in range(100):
            with trace.span("seconds/work"):
                time.sleep(0.0001)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.take()["seconds/work"].value >= 8 * 100 * 0.0001
