"""Runs beside one another, from their folders alone: recipes, held-out results task by task, curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.registry import did_you_mean
from tandem.errors import TandemError
from tandem.observability.board import CURVES, percent_with_interval, sparkline
from tandem.observability.report import folder as folders
from tandem.observability.report.folder import Row, RunFolder
from tandem.observability.report.summary import column, summarise
from tandem.types import Json

_PLOTTED = ("reward", "length")
_WIDTH = 24
_ANYWHERE = frozenset(("name", "runs"))
"""Options in which any two runs differ."""


def compare(*paths: Path) -> ComparedRuns:
    """Read runs; raises TandemError for a folder that is none."""
    return ComparedRuns(tuple(folders.load(path) for path in paths))


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRuns:
    """Two or more runs; its text is what ``tandem compare`` prints."""

    runs: tuple[RunFolder, ...]
    """Differences are to the first."""

    @property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """Options by dotted path that differ, with the value in each run; empty where it is not set."""
        recipes = [dict(_by_path(run.config)) for run in self.runs]
        names = dict.fromkeys(name for options in recipes for name in options if name not in _ANYWHERE)
        values = {name: tuple(options.get(name, "") for options in recipes) for name in names}
        return {name: each for name, each in values.items() if len(set(each)) > 1}

    def plot(self, *metrics: str) -> Any:
        """A figure of matplotlib: a panel for each metric, by default reward and length, every run in it.

        Raises:
            TandemError: no run has such a metric, or matplotlib is missing.
        """
        known = sorted({name for run in self.runs for row in run.metrics for name in row["metrics"]})
        for name in metrics:
            if name not in known:
                raise TandemError(f"no step has a metric {name!r}{did_you_mean(name, known)}")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise TandemError(f"curves need matplotlib ({error}): pip install matplotlib") from error

        names = metrics or _PLOTTED
        figure = Figure(figsize=(5 * len(names), 3.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for run in self.runs:
                rows = [row for row in run.metrics if row["metrics"].get(name) is not None]
                axes.plot([row["step"] for row in rows], [row["metrics"][name] for row in rows], label=run.name)
            axes.set(title=name, xlabel="step")
            axes.legend()
        return figure

    def __repr__(self) -> str:
        summaries = [summarise(run) for run in self.runs]
        rows = [
            ["", *(run.name for run in self.runs)],
            ["", *(f"{each['status']}, {each['steps']} steps" for each in summaries)],
            *([name, *values] for name, values in self.differences.items()),
            [],
            *self._results(),
            [],
            *(row for name in CURVES if (row := self._curve(name))),
        ]
        widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(len(self.runs) + 1)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    @property
    def gains(self) -> tuple[tuple[Gain | None, ...], ...]:
        """How much better than the first run each is held out, first at its first evaluation and then at its last."""
        first = self.runs[0].evaluations
        return tuple(
            tuple(
                _gain(first[place], run.evaluations[place]) if min(len(first), len(run.evaluations)) > -place else None
                for run in self.runs
            )
            for place in (0, -1)
        )

    def _results(self) -> Iterator[list[str]]:
        """The first and the last held-out results of every run, and how far each is from the first run's."""
        fewest = min(len(run.evaluations) for run in self.runs)
        for place, gains in list(zip((0, -1), self.gains, strict=True))[:fewest]:
            rows = [run.evaluations[place] for run in self.runs]
            yield ["held out", *(f"{row['env']} {percent_with_interval(row)} at step {row['step']}" for row in rows)]
            yield ["", "", *(str(gain or _UNPAIRED) for gain in gains[1:])]

    def _curve(self, name: str) -> list[str]:
        """A metric of each run on one scale; empty where none has it."""
        series = [column(run, name) for run in self.runs]
        every = [value for values in series for value in values]
        if not every:
            return []
        bounds = min(every), max(every)
        return [name, *(f"{sparkline(v, _WIDTH, bounds)} {v[-1]:.4g}" if v else "" for v in series)]


def _by_path(config: Mapping[str, Json], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _by_path(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", str(value)


_UNPAIRED = "no paired interval: the tasks differ, or are not recorded"


def paired(first: Row, other: Row) -> str:
    """How much better the other is, with a 95 % interval of the difference task by task."""
    return str(_gain(first, other) or _UNPAIRED)


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better held-out results are than others, task by task."""

    mean: float
    ci: tuple[float, float]
    """95 % interval of the mean."""
    better: int
    """Tasks."""
    worse: int
    """Tasks."""

    def __str__(self) -> str:
        low, high = self.ci
        return f"{self.mean:+.3f} [{low:+.3f}, {high:+.3f}] paired: {self.better} tasks better, {self.worse} worse"


def half_interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of a mean; infinite for that of a single value."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _gain(first: Row, other: Row) -> Gain | None:
    """None where the tasks are not the same, or results are not recorded task by task."""
    shown = [[(task.get("task"), task.get("prompt")) for task in row.get("rollouts", ())] for row in (first, other)]
    counts = [row.get("solved") for row in (first, other)]
    if not (counts[0] and counts[1]) or shown[0] != shown[1] or len(counts[0]) != len(counts[1]):
        return None
    gains = [b / other["samples"] - a / first["samples"] for a, b in zip(*counts, strict=True)]
    mean, half = statistics.fmean(gains), half_interval(gains)
    return Gain(mean, (mean - half, mean + half), sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains))
