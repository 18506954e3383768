"""What takes long is told: to displays that ask, to those that listen, in lines and as a bar."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from tandem.observability import progress
from tandem.observability.loggers.base import RunInfo


@contextmanager
def listened() -> Iterator[list[str]]:
    lines: list[str] = []
    stop = progress.listen(progress.ProgressLines(lines.append))
    try:
        yield lines
    finally:
        stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_what_is_under_way_is_known_until_it_ends() -> None:
    with progress.under_way("evaluating", total=4, unit="tasks") as outer, progress.under_way("grading") as inner:
        assert progress.current() == (outer, inner)
    assert (progress.current(), outer.over, inner.over) == ((), True, True)
    with pytest.raises(ValueError, match="x"), progress.under_way("failing") as failed:
        raise ValueError("x")
    assert (progress.current(), failed.over) == ((), True)


def test_lines_say_little_of_what_is_short_and_the_rest_now_and_then(clock: list[float]) -> None:
    with listened() as lines:
        with progress.under_way("sampling", total=100, unit="groups") as shown:
            for _ in range(100):
                clock[0] += 1.0
                shown.advance()
        with progress.under_way("sampling", total=2) as shown:
            shown.advance()
    assert [line.partition(",")[0] for line in lines] == [f"sampling {n} of 100 groups" for n in (15, 45, 75)]


def test_lines_tell_what_nothing_is_known_of_when_it_begins_and_when_it_took_long(clock: list[float]) -> None:
    with listened() as lines:
        with progress.under_way("loading the weights"):
            clock[0] += 7.0
        with progress.under_way("starting the engine"):
            clock[0] += 1.0
    assert lines == ["loading the weights", "loading the weights took 7.0 s", "starting the engine"]


def test_the_live_board_has_a_bar_for_what_takes_longer_than_a_person_waits(tmp_path: Path, clock: list[float]) -> None:
    from tandem.observability.loggers._terminal import LiveWriter

    terminal = Console(file=io.StringIO(), record=True, width=100)
    writer = LiveWriter(RunInfo(name="x", folder=tmp_path, steps=3, config={}), terminal)

    def drawn() -> str:
        terminal.export_text()
        terminal.print(writer.picture())
        return terminal.export_text()

    with progress.under_way("evaluating", total=40, unit="tasks") as shown:
        shown.reach(10)
        clock[0] += 4.0
        assert "evaluating" not in drawn()
        clock[0] += 4.0
        assert "evaluating 10/40 tasks" in drawn()
        assert "24 s left" in drawn()
    assert "evaluating" not in drawn()
    writer.close()
