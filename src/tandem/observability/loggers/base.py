"""Base of loggers: destinations of a step's metrics. A logger that fails warns once and never stops training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem import importing
from tandem.errors import ConfigError
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Description of the run that every logger gets when it opens."""

    name: str
    """The run's name."""
    folder: Path
    """The run's folder."""
    steps: int
    """Optimizer steps the run will take."""
    config: Mapping[str, Json]
    """The resolved recipe as plain JSON."""
    resumed_step: int = 0
    """Step the run starts from; 0 for a fresh one."""


class Writer(Protocol):
    """An open logger."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of one step; called once per step."""
        return

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        """An evaluation: the whole record, and the numbers of it under ``eval/``."""
        self.write(step, scalars)

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        """Something happened between steps: phase changes, waits, saves, dropped groups."""
        return

    def close(self) -> None:
        """Flush."""
        return


class TrackerWriter(Writer):
    """Base of writers to a tracker's run, beside the library that it is of."""

    def __init__(self, run: Any, library: Any) -> None:
        self._run, self._library = run, library

    def close(self) -> None:
        self._run.finish()


class MetricsLogger(ABC):
    """A frozen dataclass whose fields are its options."""

    def check(self) -> None:
        """Find out now, before weights load, whether it could open.

        Raises:
            ConfigError: a library is missing; names the extra to install.
        """
        return

    @abstractmethod
    def open(self, info: RunInfo) -> Writer:
        """Open it for one run; a resumed run appends after ``resumed_step``."""


def library(module: str, extra: str) -> Any:
    """Import a logger's library; raises ConfigError, which names the extra that installs it."""
    return importing.library(module, f"the {extra} logger", extra, ConfigError)


PHASES = {
    "wait": "sampling", "pack": "training", "forward_backward": "training", "optimizer": "training", "sync": "publish",
    "record": "writing", "checkpoint": "checkpoint", "evaluate": "evaluation",
}  # fmt: skip
"""What a person calls the part of a step that a span ``seconds/<part>`` measures; sampling is graded as it comes."""
WAITING = "waiting"
"""What ``seconds/wait`` is, for samples, where sampling goes on while a step is trained (``max_lag`` above 0)."""


def phase(span: str, config: Mapping[str, Json]) -> str:
    """Display name of a span such as ``seconds/forward_backward`` in a run with this recipe."""
    part = span.removeprefix("seconds/")
    return WAITING if part == "wait" and config.get("max_lag") else PHASES.get(part, part.replace("_", " "))


def phases(scalars: Mapping[str, float], config: Mapping[str, Json]) -> dict[str, float]:
    """Seconds of each phase by the spans in ``scalars``, the longest first."""
    seconds_by_phase: dict[str, float] = {}
    for part in PHASES:
        if seconds := scalars.get(f"seconds/{part}"):
            name = phase(part, config)
            seconds_by_phase[name] = seconds_by_phase.get(name, 0.0) + seconds
    return dict(sorted(seconds_by_phase.items(), key=lambda item: -item[1]))


def completion_rows(fields: Mapping[str, Json]) -> list[dict[str, Json]]:
    """Rows of a logger's table, by the fields of the event ``completions``; each reward is a column ``rewards/<name>``.

    All rows have the same columns.
    """
    samples = fields["samples"]
    names = dict.fromkeys(name for one in samples for name in one.get("rewards") or ())
    return [
        {"step": fields["step"]}
        | {name: one[name] for name in ("env", "task", "prompt", "answer")}
        | {"completion": one["text"], "reward": one["reward"]}
        | {f"rewards/{name}": (one.get("rewards") or {}).get(name) for name in names}
        | {"advantage": one.get("advantage")}
        for one in samples
    ]


def parts(sample: Mapping[str, Json]) -> str:
    """The parts of an answer's reward in words: ``number 0, format 0.5``."""
    return ", ".join(f"{name} {value:.4g}" for name, value in (sample.get("rewards") or {}).items())


def option(config: Json, path: str) -> Json:
    """An option of a resolved recipe by its dotted path; None if there is none."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def kind(part: Json) -> str:
    """Display name of a part of a recipe: its kind, of one outside the tree without its module."""
    named = str(part.get("kind") or "") if isinstance(part, Mapping) else str(part or "")
    return named.rpartition(":")[2]
