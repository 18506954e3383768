"""Console logger: a line per step, and on a terminal what the run does now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Console(MetricsLogger):
    """Show the run in the terminal: the numbers that matter of each step, progress, and waits."""

    live: Literal["auto", "always", "never"] = "auto"
    """Whether what the run does now is shown below the lines of its steps: auto in a terminal, else always or never."""

    def open(self, info: RunInfo) -> Writer:
        """Start showing; a resumed run shows its past too."""
        from rich.console import Console as Terminal

        from tandem.observability.loggers._terminal import LiveWriter, PlainWriter

        terminal = Terminal(force_terminal=True if self.live == "always" else None)
        return LiveWriter(info, terminal) if self.live != "never" and terminal.is_interactive else PlainWriter(info)
