"""Progress of long work: how far it is, how long it will take, and how a terminal shows it.

Long work calls ``under_way``; displays ask for ``current``, or ``listen`` for every change.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem.observability.board import duration

LONG = 5.0
"""Seconds after which a person wants to know how far something is."""

_lock = threading.Lock()
_open: list[Progress] = []
_listeners: list[Callable[[Progress], None]] = []


@dataclass(slots=True, kw_only=True, eq=False)
class Progress:
    """One thing that is under way."""

    what: str
    """What is done: evaluating, loading the weights."""
    total: int = 0
    """How much there is to do; 0 if unknown."""
    unit: str = ""
    """What is counted: groups, tasks."""
    done: int = 0
    """How much of it is done."""
    over: bool = False
    """True once it has ended, well or not."""
    begun: float = field(default_factory=lambda: time.monotonic())
    """When it began, on the monotonic clock."""

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self.begun

    @property
    def left(self) -> float | None:
        """Seconds left, at the pace so far; None while nothing is done."""
        return self.seconds * (self.total - self.done) / self.done if self.total and self.done else None

    def reach(self, done: int) -> None:
        """Set how much is done."""
        if done != self.done:
            self.done = done
            _notify(self)

    def advance(self) -> None:
        """Count one more as done."""
        self.reach(self.done + 1)


@contextmanager
def under_way(what: str, total: int = 0, unit: str = "") -> Iterator[Progress]:
    """Register long work for as long as the block lasts.

    Example:
        >>> with under_way("evaluating", total=len(tasks), unit="tasks") as shown:
        ...     for task in tasks:
        ...         look(task)
        ...         shown.advance()
    """
    work = Progress(what=what, total=total, unit=unit)
    with _lock:
        _open.append(work)
    _notify(work)
    try:
        yield work
    finally:
        with _lock:
            _open.remove(work)
        work.over = True
        _notify(work)


def current() -> tuple[Progress, ...]:
    """Everything under way, oldest first; safe from any thread."""
    with _lock:
        return tuple(_open)


def listen(listener: Callable[[Progress], None]) -> Callable[[], None]:
    """Call ``listener`` when something begins, advances or ends, until the returned function is called."""
    with _lock:
        _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def _notify(work: Progress) -> None:
    for listener in tuple(_listeners):
        with contextlib.suppress(OSError):  # a terminal that is gone ends no work
            listener(work)


_FIRST, _EVERY = 15.0, 30.0
"""Seconds until the first line about work of known size, and between two: unlike a bar, a line stays."""


def text(shown: Progress) -> str:
    """``evaluating 12 of 40 tasks, 14 s gone, about 33 s left``."""
    parts = [f"{shown.what} {shown.done} of {shown.total} {shown.unit}".rstrip() if shown.total else shown.what]
    parts.append(f"{duration(shown.seconds)} gone")
    if shown.left is not None:
        parts.append(f"about {duration(shown.left)} left")
    return ", ".join(parts)


class ProgressLines:
    """Reports long work in lines: its begin and end where its size is unknown, else how far it is."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._reported: dict[Progress, float] = {}

    def __call__(self, shown: Progress) -> None:
        """Report a change, if it is due."""
        last = self._reported.get(shown)
        if shown.over:
            self._reported.pop(shown, None)
            if not shown.total and shown.seconds >= LONG:
                self._say(f"{shown.what} took {duration(shown.seconds)}")
        elif not shown.total:
            self._reported[shown] = time.monotonic()
            self._say(shown.what)
        elif shown.done and (shown.seconds >= _FIRST if last is None else time.monotonic() - last >= _EVERY):
            self._reported[shown] = time.monotonic()
            self._say(text(shown))


@contextmanager
def shown() -> Iterator[None]:
    """Write lines on everything under way to stderr while the block lasts, for commands other than runs."""
    stop = listen(ProgressLines(lambda line: sys.stderr.write(f"{line}\n")))
    try:
        yield
    finally:
        stop()
