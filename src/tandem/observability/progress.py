"""What takes long: what it is, how far it has come and how long it will take still.

Whoever does it says so with ``under_way``; displays ask for ``current``, or ``listen`` for every change.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LONG = 5.0
"""Seconds after which a person wants to know how far something has come."""

_lock = threading.Lock()
_open: dict[int, Progress] = {}
_listeners: dict[int, Callable[[Progress], None]] = {}
_numbers = itertools.count()


@dataclass(slots=True, kw_only=True, eq=False)
class Progress:
    """One thing that is under way."""

    what: str
    """What is done: evaluating, loading the weights."""
    total: int = 0
    """How much there is to do; 0: it is not known."""
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
        """Seconds that it needs still, if the rest goes like what is done; None while nothing is."""
        return self.seconds * (self.total - self.done) / self.done if self.total and self.done else None

    def reach(self, done: int) -> None:
        """So much is done."""
        if done != self.done:
            self.done = done
            _tell(self)

    def advance(self) -> None:
        """One more is done."""
        self.reach(self.done + 1)


@contextmanager
def under_way(what: str, total: int = 0, unit: str = "") -> Iterator[Progress]:
    """Something that may take long, for as long as the block lasts.

    Example:
        >>> with under_way("evaluating", total=len(tasks), unit="tasks") as shown:
        ...     for task in tasks:
        ...         look(task)
        ...         shown.advance()
    """
    mine = Progress(what=what, total=total, unit=unit)
    number = next(_numbers)
    with _lock:
        _open[number] = mine
    _tell(mine)
    try:
        yield mine
    finally:
        with _lock:
            del _open[number]
        mine.over = True
        _tell(mine)


def current() -> tuple[Progress, ...]:
    """Everything that is under way, what began first first; safe from any thread."""
    with _lock:
        return tuple(_open.values())


def listen(listener: Callable[[Progress], None]) -> Callable[[], None]:
    """Call ``listener`` when something begins, comes nearer to its end or ends, until what is returned is called."""
    number = next(_numbers)
    with _lock:
        _listeners[number] = listener

    def stop() -> None:
        with _lock:
            _listeners.pop(number, None)

    return stop


def _tell(what: Progress) -> None:
    with _lock:
        listeners = tuple(_listeners.values())
    for listener in listeners:
        listener(what)
