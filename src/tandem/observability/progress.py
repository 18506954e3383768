"""Progress of what takes long: how far it has come, how long it will take still, and how a terminal shows it.

Code that takes long says so with ``under_way``; displays ask for ``current``, or ``listen`` for every change.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.observability.board import duration

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import RenderableType

logger = logging.getLogger(__name__)

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
    """Call ``listener`` when something begins, comes nearer to its end or ends, until what is returned is called.

    One that raises (its terminal is gone) is warned of and not called again: what is under way goes on.
    """
    number = next(_numbers)
    with _lock:
        _listeners[number] = listener

    def stop() -> None:
        with _lock:
            _listeners.pop(number, None)

    return stop


def _tell(what: Progress) -> None:
    with _lock:
        listeners = tuple(_listeners.items())
    for number, listener in listeners:
        try:
            listener(what)
        except Exception as error:
            with _lock:
                _listeners.pop(number, None)
            logger.warning("progress is no longer shown: %s: %s", type(error).__name__, error, exc_info=True)


_FIRST, _EVERY = 15.0, 30.0
"""Seconds until the first line about something whose end is foreseen, and between two: a line stays, a bar does not."""


def text(shown: Progress) -> str:
    """``evaluating 12 of 40 tasks, 14 s gone, about 33 s left``."""
    parts = [f"{shown.what} {shown.done} of {shown.total} {shown.unit}".rstrip() if shown.total else shown.what]
    parts.append(f"{duration(shown.seconds)} gone")
    if shown.left is not None:
        parts.append(f"about {duration(shown.left)} left")
    return ", ".join(parts)


def bar(shown: Progress) -> RenderableType:
    """One line: a bar with the time that is left, or the time that is gone where nothing is known of the rest."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    count = f" {shown.done}/{shown.total} {shown.unit}" if shown.total else ""
    rest = "" if shown.left is None else f" · {duration(shown.left)} left"
    filled = ProgressBar(total=shown.total or None, completed=shown.done, pulse=not shown.total)
    line.add_row(Text(shown.what + count), filled, Text(duration(shown.seconds) + rest))
    return line


class ProgressLines:
    """Says in lines what takes long: its beginning and end where nothing is known of the rest, else how far it is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` writes one line."""
        self._say = say
        self._reported: dict[Progress, float] = {}

    def __call__(self, shown: Progress) -> None:
        """Something began, came nearer to its end or ended."""
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
def shown(terminal: Terminal | None = None) -> Iterator[None]:
    """Show everything that is under way while the block lasts, for a command that is no run; on stderr by default."""
    from rich.console import Console

    terminal = Console(stderr=True) if terminal is None else terminal
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        stop = listen(ProgressLines(lambda line: terminal.out(line, highlight=False)))
        try:
            yield
        finally:
            stop()
        return
    from rich.console import Group
    from rich.live import Live

    with Live(get_renderable=lambda: Group(*map(bar, current())), console=terminal, transient=True):
        yield
