"""Reward minus the mean of the other siblings."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.advantages.base import centred, scores
from tandem.types import Group


@dataclass(frozen=True, kw_only=True)
class Rloo:
    """REINFORCE leave-one-out (arXiv 2402.14740, equation 8): A_i = r_i - mean of r_j over j != i.

    The baseline excludes the rollout's own reward, so it is unbiased: n / (n - 1) times the deviation from the mean.
    """

    def __call__(self, group: Group) -> list[float]:
        """Deviations from the others' mean; they sum to 0."""
        values = centred(scores(group))
        scale = len(values) / max(1, len(values) - 1)
        return [scale * value for value in values]
