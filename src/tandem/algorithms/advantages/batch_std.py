"""Reward minus the group's mean, over the standard deviation of the whole step's rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.algorithms.advantages.base import centred, deviation, scores
from tandem.errors import Bounded, bounded
from tandem.types import Group


@dataclass(frozen=True, kw_only=True)
class BatchStd(Bounded):
    """Group mean, batch deviation (arXiv 2508.08221): A_i = (r_i - mean of its group) / (std of the step + eps).

    One scale for every task of a step: unlike a group's own deviation it does not favour tasks that are nearly always
    or nearly never solved. std is over the rewards of all groups trained in the step, squares over n - 1, as TRL's is;
    over their deviations from the mean it is REINFORCE++ with a baseline (arXiv 2501.03262).
    """

    std_of: Literal["rewards", "deviations"] = "rewards"
    """What the standard deviation is of: rewards, or their deviations from their group's mean."""

    eps: float = bounded(1e-4, above=0)
    """Added to the standard deviation."""

    def __call__(self, group: Group) -> list[float]:
        """Deviations from the mean, before they are scaled."""
        return centred(scores(group))

    def rescale(self, groups: Sequence[Group], values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Divided by the step's deviation."""
        rewards = map(scores, groups)
        std = deviation([x for part in (rewards if self.std_of == "rewards" else values) for x in part])
        return [[value / (std + self.eps) for value in group_values] for group_values in values]
