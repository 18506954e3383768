"""How far something has come that takes long: a bar where somebody looks at a terminal, few lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tandem.observability import progress
from tandem.observability.loggers._board import duration
from tandem.observability.progress import LONG, Progress

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import RenderableType

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


class Lines:
    """Says in lines what takes long: its beginning and end where nothing is known of the rest, else how far it is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` writes one line."""
        self._say = say
        self._told: dict[Progress, float] = {}

    def __call__(self, shown: Progress) -> None:
        """Something began, came nearer to its end or ended."""
        told = self._told.get(shown)
        if shown.over:
            self._told.pop(shown, None)
            if not shown.total and shown.seconds >= LONG:
                self._say(f"{shown.what} took {duration(shown.seconds)}")
        elif not shown.total:
            self._told[shown] = time.monotonic()
            self._say(shown.what)
        elif shown.done and (shown.seconds >= _FIRST if told is None else time.monotonic() - told >= _EVERY):
            self._told[shown] = time.monotonic()
            self._say(text(shown))


@contextmanager
def shown(terminal: Terminal) -> Iterator[None]:
    """Show everything that is under way while the block lasts, for a command that has no other display."""
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        stop = progress.listen(Lines(lambda line: terminal.out(line, highlight=False)))
        try:
            yield
        finally:
            stop()
        return
    from rich.console import Group
    from rich.live import Live

    with Live(get_renderable=lambda: Group(*map(bar, progress.current())), console=terminal, transient=True):
        yield
