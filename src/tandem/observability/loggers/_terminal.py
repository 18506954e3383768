"""The console logger's writers: a line per step, and on a terminal below the lines what the run does now."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from tandem.observability import board as boards
from tandem.observability import json_lines, progress, trace, waits
from tandem.observability.board import duration
from tandem.observability.loggers.base import RunInfo, phase
from tandem.observability.progress import LONG, Progress
from tandem.types import Json

ORANGE = "dark_orange"


class PlainWriter:
    """Lines. Written by hand: Rich would wrap them, and ends the process when a pipe is closed."""

    def __init__(self, info: RunInfo) -> None:
        self._info, self._step, self._last_event = info, info.resumed_step, list[str]()
        self._evaluations = list(json_lines.read(info.folder / "eval.jsonl"))
        self._begun = time.monotonic()
        self._ends: deque[float] = deque(maxlen=21)
        self._say(" · ".join([info.name, *boards.settings(info.config), f"{info.steps} steps"]))
        self._stop = self._open()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tell the numbers of a step."""
        self._step = step
        self._ends.append(time.monotonic())
        self._say(boards.step_line(step, self._info.steps, scalars, self._seconds_left()))

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        """Tell an evaluation, with its first answer."""
        self._evaluations.append({**record, "step": step})
        self._say(boards.evaluation_line(self._evaluations))
        for line in boards.held_out_lines(record, self._info.config):
            self._say(line)

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        """Tell an event, unless it is the last one again."""
        if (lines := boards.event_lines(name, fields)) != self._last_event:  # each request tells of its engine's end
            for line in lines:
                self._say(line)
        self._last_event = lines

    def close(self) -> None:
        """Show no more progress."""
        self._stop()

    def _open(self) -> Callable[[], None]:
        """Begin to show progress; returns what ends it."""
        return progress.listen(progress.ProgressLines(self._say))

    def _say(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def _seconds_left(self) -> float | None:
        """Estimate from the recent steps, and how long the one under way has lasted; None before there are two."""
        if not (gaps := [b - a for a, b in itertools.pairwise(list(self._ends))]):
            return None
        gone, steps = time.monotonic() - self._ends[-1], self._info.steps - self._step
        return max(statistics.fmean(gaps) * steps - gone, 0.0)


class LiveWriter(PlainWriter):
    """The same above a few lines, redrawn in place, of how far the run is and what it does."""

    def __init__(self, info: RunInfo, terminal: Terminal) -> None:
        self._terminal = terminal
        super().__init__(info)

    def picture(self) -> RenderableType:
        """Steps with the time left, what is under way, and bars of what takes long."""
        steps, left, gone = self._info.steps, self._seconds_left(), duration(time.monotonic() - self._begun)
        run = _bar(f"step {self._step}/{steps}", self._step, max(steps, 1), gone, left)
        return Group(run, self._now(), *(_work(work) for work in progress.current() if work.seconds >= LONG))

    def _now(self) -> RenderableType:
        spans, waiting = trace.current()[-2:], waits.current()
        doing = " › ".join(f"{phase(name, self._info.config)} {duration(seconds)}" for name, seconds in spans)
        text = Text(doing, "bold", no_wrap=True, overflow="ellipsis")
        for wait in waiting[:1]:
            text.append(f"  {wait.owner} waits for {wait.on}", ORANGE)
            text.append(f" ({wait.reason}) {duration(wait.seconds)}", "default")
            text.append(f" +{len(waiting) - 1}" * (len(waiting) > 1))
        return text

    def _open(self) -> Callable[[], None]:
        # Redirecting puts log lines above the picture instead of through it.
        live = Live(
            get_renderable=self.picture,
            console=self._terminal,
            redirect_stdout=True,
            redirect_stderr=True,
            transient=True,
        )
        live.start()
        return live.stop

    def _say(self, line: str) -> None:
        self._terminal.print(Text(line), highlight=False)


def _work(work: Progress) -> Table:
    count = f" {work.done}/{work.total} {work.unit}" if work.total else ""
    return _bar(work.what + count, work.done, work.total, duration(work.seconds), work.left)


def _bar(label: str, done: int, total: int, gone: str, left: float | None) -> Table:
    """A label, a bar as wide as the terminal allows, the time gone and the time left; 0 is an unknown total."""
    row = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
    times = gone if left is None else f"{gone} · {duration(left)} left"
    row.add_row(Text(label), ProgressBar(total=total or None, completed=done, pulse=not total), times)
    return row
