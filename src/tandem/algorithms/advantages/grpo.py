"""Reward minus the group's mean, over the group's standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tandem.algorithms.advantages.base import centred, scores
from tandem.errors import Bounded, bounded
from tandem.types import Group


@dataclass(frozen=True, kw_only=True)
class GroupStandardised(Bounded):
    """GRPO (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / (std(r) + eps)."""

    std: Literal["sample", "population"] = "sample"
    """sample divides squared deviations by n - 1, as torch and TRL do; population by n, as numpy does."""
    eps: float = bounded(1e-4, above=0)
    """Added to the standard deviation; differences below it hardly count."""

    def __call__(self, group: Group) -> list[float]:
        """Standardised deviations; they sum to 0."""
        values = centred(scores(group))
        squares = math.fsum(value * value for value in values)
        std = math.sqrt(squares / max(1, len(values) - (self.std == "sample")))
        return [value / (std + self.eps) for value in values]
