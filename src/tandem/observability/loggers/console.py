"""Console logger: a live board on a terminal, a line per step in a file or a pipe."""

from __future__ import annotations

import codecs
import io
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.errors import require
from tandem.observability import board as boards
from tandem.observability import progress
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Console(MetricsLogger):
    """Show the run in the terminal: progress, waits, and the numbers that matter."""

    live: Literal["auto", "always", "never"] = "auto"
    """auto: a live board in a terminal, one line per step elsewhere; always and never choose one."""
    refresh: float = 4.0
    """Redraws per second of the live board."""

    def __post_init__(self) -> None:
        require(refresh=(0 < self.refresh < math.inf, "above 0 (redraws per second)"))

    def inert(self) -> Mapping[str, str]:
        """Without a live board there is nothing to redraw."""
        return {"refresh": "live is never, so nothing is redrawn"} if self.live == "never" else {}

    def open(self, info: RunInfo) -> Writer:
        """Start showing; a resumed run shows its past too."""
        from rich.console import Console as Terminal

        if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
            sys.stdout.reconfigure(errors="replace")  # answers hold any letter
        terminal = Terminal(force_terminal=True if self.live == "always" else None)
        looked_at = terminal.is_terminal and not terminal.is_dumb_terminal
        if self.live == "always" or (self.live == "auto" and looked_at):
            from tandem.observability.loggers._live import LiveWriter

            return LiveWriter(info, terminal, self.refresh)
        return PlainWriter(info)


class PlainWriter:
    """Lines. Written by hand: Rich would wrap them, and ends the process when a pipe is closed."""

    def __init__(self, info: RunInfo) -> None:
        self.board = boards.RunBoard(info)
        self._say(" · ".join([info.name, *boards.settings(info.config), f"{info.steps} steps"]))
        self._stop = progress.listen(progress.ProgressLines(self._say))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tell the numbers of a step."""
        self.board.write(step, scalars)
        self._say(boards.step_line(self.board))

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        """Tell an evaluation, with its first answer."""
        self.board.evaluation(step, record)
        self._say(boards.evaluation_line(self.board))
        for line in boards.held_out_lines(record, self.board.info.config):
            self._say(line)

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        """Tell an event."""
        for line in boards.event_lines(name, fields):
            self._say(line)

    def close(self) -> None:
        """Show no more progress."""
        self._stop()

    def _say(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
