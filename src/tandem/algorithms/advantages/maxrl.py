"""Reward minus the group's mean, over the group's mean."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.advantages.base import centred, scores
from tandem.errors import RewardError
from tandem.types import Group


@dataclass(frozen=True, kw_only=True)
class MaxRl:
    """MaxRL (arXiv 2602.02710): A_i = (r_i - mean(r)) / mean(r), and 0 if no sibling earned anything.

    For rewards of 0 and 1 the expected gradient is that of log p(solved), cut after as many terms as there are
    siblings: a task that is solved once in n weighs n times as much as one that is always solved.
    """

    def __call__(self, group: Group) -> list[float]:
        """Deviations in units of the mean; they sum to 0.

        Raises:
            RewardError: a reward is negative, so the mean does not measure success.
        """
        rewards = scores(group)
        if rewards and min(rewards) < 0:
            below = f"group {group.id} has a reward of {min(rewards):g}, and maxrl takes rewards of at least 0"
            raise RewardError(f"{below}; drop the penalty, or choose another advantage")
        mean = sum(rewards) / max(1, len(rewards))
        return [value / mean for value in centred(rewards)] if mean > 0 else [0.0] * len(rewards)
