"""Console logger: a live board on a terminal, a line per step in a file or a pipe."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.errors import bounded, check_bounds
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Console(MetricsLogger):
    """Show the run in the terminal: progress, waits, and the numbers that matter."""

    live: Literal["auto", "always", "never"] = "auto"
    """auto: a live board in a terminal, one line per step elsewhere; always and never choose one."""
    refresh: float = bounded(4.0, above=0)
    """Redraws per second of the live board."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def inert(self) -> Mapping[str, str]:
        """Without a live board there is nothing to redraw."""
        return {"refresh": "live is never, so nothing is redrawn"} if self.live == "never" else {}

    def open(self, info: RunInfo) -> Writer:
        """Start showing; a resumed run shows its past too."""
        from rich.console import Console as Terminal

        from tandem.observability.loggers._terminal import LiveWriter, PlainWriter

        if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
            sys.stdout.reconfigure(errors="replace")  # answers hold any letter
        terminal = Terminal(force_terminal=True if self.live == "always" else None)
        looked_at = terminal.is_terminal and not terminal.is_dumb_terminal
        if self.live == "always" or (self.live == "auto" and looked_at):
            return LiveWriter(info, terminal, self.refresh)
        return PlainWriter(info)
