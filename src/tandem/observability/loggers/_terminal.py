"""What the console shows: lines, and on a terminal a live board below them, which Rich redraws from a `RunBoard`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console as Terminal
from rich.console import ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.observability import board as boards
from tandem.observability import progress, trace, waits
from tandem.observability.board import RunBoard, duration, number, sparkline
from tandem.observability.loggers.base import RunInfo, phase, phases
from tandem.observability.progress import LONG
from tandem.types import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

BLUE, ORANGE = "dodger_blue2", "dark_orange"  # told apart with any colour vision


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


class LiveWriter(PlainWriter):
    """A board below the lines, redrawn in place until it is closed; the last picture stays."""

    def __init__(self, info: RunInfo, terminal: Terminal, refresh: float) -> None:
        self.board = RunBoard(info)
        picture = Picture(self.board)
        # Redirecting puts log lines above the board instead of through it.
        self._live = Live(
            get_renderable=lambda: picture,
            console=terminal,
            refresh_per_second=refresh,
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._live.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the numbers of a step from the next redraw on."""
        self.board.write(step, scalars)

    def close(self) -> None:
        """Draw once more and give the cursor back."""
        self.board.closed = True
        self._live.stop()

    def _say(self, line: str) -> None:
        self._live.console.print(Text(line), highlight=False)


class Picture:
    """A `RunBoard` as Rich draws it."""

    def __init__(self, board: RunBoard) -> None:
        self._board = board

    def __rich_console__(self, terminal: Terminal, options: ConsoleOptions) -> RenderResult:
        """Draw at the terminal's width."""
        board = self._board
        with board.lock:
            blocks = [_line(" · ".join(boards.settings(board.info.config))), self._progress(), self._now()]
            if not board.closed:
                blocks += [progress.bar(work) for work in progress.current() if work.seconds >= LONG]
            blocks += [Text(), self._numbers(options.max_width)]
            blocks += [Text(), _line(boards.evaluation_line(board), "bold")] if board.evaluations else []
            yield Panel(
                Group(*blocks),
                title=Text.assemble((" tandem ", f"bold {BLUE}"), (f"{board.info.name} ", "bold")),
                title_align="left",
                border_style="bright_black",
                padding=(0, 1),
            )

    def _progress(self) -> RenderableType:
        board, steps = self._board, self._board.info.steps
        left = board.seconds_left()
        gone = duration(time.monotonic() - board.begun)
        bar = ProgressBar(total=max(steps, 1), completed=board.step, complete_style=BLUE, finished_style=BLUE)
        rest = f" · {duration(left)} left" if left is not None and not board.closed else ""
        return progress.bar_row(Text.assemble("step ", (f"{board.step}", "bold"), f"/{steps}"), bar, gone + rest)

    def _now(self) -> RenderableType:
        board = self._board
        if board.closed:
            return _line("ended")
        waiting, config = waits.current(), board.info.config
        doing = " › ".join(f"{phase(name, config)} {duration(seconds)}" for name, seconds in trace.current()[-2:])
        text = _line("" if doing or waiting else "between two phases").append(doing, "bold")
        for wait in waiting[:1]:
            text.append(f"  {wait.owner} waits for {wait.on}", ORANGE)
            text.append(f" ({wait.reason}) {duration(wait.seconds)}", "default")
            text.append(f" +{len(waiting) - 1}" * (len(waiting) > 1))
        return text

    def _numbers(self, width: int) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=12, no_wrap=True)
        table.add_column(width=9, justify="right", no_wrap=True)
        table.add_column(width=8, style="bright_black", no_wrap=True)
        spark = max(8, min(48, width - 67))
        table.add_column(width=spark, style=BLUE, no_wrap=True)
        table.add_column(width=30, style="bright_black", no_wrap=True, overflow="ellipsis")
        scalars = self._board.scalars
        for metric, label, unit in boards.ROWS:
            if metric in scalars:
                line = sparkline(self._board.history(metric), spark)
                value = Text(number(scalars[metric], metric), style="bold")
                table.add_row(label, value, unit, line, self._longest() if metric == "seconds/step" else "")
        return table if scalars else Text("no step has finished yet", style="bright_black")

    def _longest(self) -> str:
        """The two phases that take most of a step."""
        seconds = phases(self._board.scalars, self._board.info.config)
        total = sum(seconds.values())
        return ", ".join(f"{100 * value / total:.0f} % {name}" for name, value in list(seconds.items())[:2])


def _line(text: str, style: str = "bright_black") -> Text:
    """A line that is cut where the terminal ends."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")
