"""Base of alarms: patterns in the metrics of the latest steps that usually mean that training goes wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from tandem.observability.alarms.history import MetricsHistory

Name = Literal[
    "reward_hacking", "length", "entropy", "zero_variance", "kl_behavior", "ess", "grad_norm", "loss", "environments",
    "grading", "stragglers",
]  # fmt: skip
"""Every alarm, as recipes, events and metrics call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of an alarm at the newest step."""

    seen: str
    """The figures, and those that they are compared to."""
    means: str
    """What it usually means."""
    change: str
    """What to change: options of the recipe with values."""


class Alarm(ABC):
    """A pattern that is looked for after every step. It keeps nothing itself: all it knows is the history."""

    name: ClassVar[Name]
    """What it is called."""
    metrics: ClassVar[tuple[str, ...]]
    """Metrics that it looks at, most telling first; the report marks their charts."""
    confirm: ClassVar[int] = 3
    """Steps in a row that must show the pattern before it is reported."""

    @abstractmethod
    def look(self, history: MetricsHistory) -> Finding | None:
        """The pattern, if the newest steps show it."""


def first(findings: Iterable[Finding | None]) -> Finding | None:
    """The first of several patterns that is there."""
    return next((finding for finding in findings if finding is not None), None)
