"""Reward minus the mean of the other siblings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.algorithms.advantages.base import scores
from tandem.types import Group


@dataclass(frozen=True, kw_only=True)
class Rloo:
    """REINFORCE leave-one-out (arXiv 2402.14740, equation 8): A_i = r_i - mean of r_j over j != i.

    A baseline that a rollout's own reward is not in, hence unbiased: n / (n - 1) times the deviation from the mean.
    """

    def __call__(self, group: Group) -> list[float]:
        """Deviations from the others' mean; they sum to 0."""
        rewards = scores(group)
        if len(rewards) < 2:
            return [0.0] * len(rewards)
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
