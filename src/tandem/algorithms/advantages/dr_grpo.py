"""Reward minus the group's mean."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.advantages.base import centred, scores
from tandem.types import Group


@dataclass(frozen=True, kw_only=True)
class DrGrpo:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): A_i = r_i - mean(r).

    Not divided by a deviation, so a task that nearly all siblings solve, or nearly none, weighs no more than others.
    """

    def __call__(self, group: Group) -> list[float]:
        """Deviations from the mean; they sum to 0."""
        return centred(scores(group))
