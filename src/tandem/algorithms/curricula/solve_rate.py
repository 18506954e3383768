"""Solve-rate curriculum: tasks that are sometimes solved come more often than those always or never solved."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.curricula.base import TaskHistory
from tandem.errors import Bounded, bounded
from tandem.types import Task


@dataclass(frozen=True, kw_only=True)
class SolveRate(Bounded):
    """Weight (4 p (1 - p)) ^ sharpness by the share p of right answers in a task's last plays, and 1 before the first.

    A group's advantages vanish if all of its answers are right or wrong, and vary most if half of them are. A higher
    sharpness prefers tasks near one half more strongly.
    """

    sharpness: float = bounded(0.5, most=8)
    """Exponent; 0 draws all tasks alike that are neither always nor never solved."""
    floor: float = bounded(0.05, above=0, most=1)
    """Least weight: how often a task comes that was always or never solved recently, since that may change; a task of
    weight 0 would never come again."""

    def weight(self, task: Task, seen: TaskHistory) -> float:
        rate = seen.rate
        if rate is None:
            return 1.0
        if rate <= 0.0 or rate >= 1.0:
            return self.floor
        spread: float = (4.0 * rate * (1.0 - rate)) ** self.sharpness
        return max(self.floor, spread)
