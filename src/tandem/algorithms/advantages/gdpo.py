"""Each reward standardised separately, then summed, then scaled over the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from tandem.algorithms.advantages.base import centred, deviation
from tandem.errors import Bounded, bounded
from tandem.types import Group, Rollout


@dataclass(frozen=True, kw_only=True)
class Gdpo(Bounded):
    """GDPO (arXiv 2601.05242): z_ik = (r_ik - mean_k) / (std_k + eps) over the group; A = standardised sum_k w_k z_ik.

    k runs over the recipe's rewards, w_k are their weights, and the last standardisation is over all groups of the
    step. If they were summed first, large rewards would drown small ones, and answers with different rewards would look
    alike. Whatever a rollout's reward has beyond its weighted parts (a penalty for truncation) is one more part. A
    group whose sums are all equal is dropped before, unless zero_variance_groups is keep.
    """

    eps: float = bounded(1e-4, above=0)
    """Added to the standard deviations."""
    _weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def weighed(self, weights: Mapping[str, Mapping[str, float]]) -> Self:
        """With the recipe's weights by environment; a reward without one counts once."""
        return dataclasses.replace(self, _weights=weights)

    def __call__(self, group: Group) -> list[float]:
        """Sums of standardised rewards, before they are standardised over the step; 0 without siblings."""
        weights = self._weights.get(group.env, {})
        parts = [_parts(rollout, weights) for rollout in group.scored]
        sums: list[list[float]] = [[] for _ in parts]
        for name in sorted({name for each in parts for name in each}):
            rows = [row for row, each in enumerate(parts) if name in each]
            values = [parts[row][name] for row in rows]
            scale = weights.get(name, 1.0) / (deviation(values) + self.eps)
            for row, value in zip(rows, centred(values), strict=True):
                sums[row].append(scale * value)
        return [math.fsum(terms) for terms in sums]

    def rescale(self, groups: Sequence[Group], values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Standardised over the step: divided by its deviation, since every group's mean is 0 already."""
        std = deviation([value for group_values in values for value in group_values])
        return [[value / (std + self.eps) for value in group_values] for group_values in values]


def _parts(rollout: Rollout, weights: Mapping[str, float]) -> dict[str, float]:
    """A rollout's rewards by name, and the rest of its sum."""
    assert rollout.reward is not None
    known = math.fsum(weights.get(name, 1.0) * value for name, value in rollout.rewards.items())
    return {**rollout.rewards, "": rollout.reward - known}
