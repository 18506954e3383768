"""Oversampling: how many groups are admitted at once, so that those with signal fill the batch without a second wave.

Which groups have signal is known only once all of them are scored. The share that had it so far, of each environment
and with older groups counting less, says how many to admit: on-policy so many that they are enough with a probability
of 90 %; where sampling is ahead of training, so many that they are too many with a probability of 10 %, for others are
admitted as they are scored, and what is over would grow stale.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Literal

Oversample = float | Literal["auto", "keep", "off"]
"""By forecast (auto; with keep what is over is trained too), not at all, or by a fixed factor."""

MEMORY = 128
"""Groups over which the share with signal is averaged: each counts by 1/128 less with every later one."""
MOST = 4
"""Times the places of an environment that it is admitted for at once, at most."""
DEVIATIONS = 1.2816
"""Standard deviations of a normal distribution below which 90 % of it lie."""


class SignalForecast:
    """The share of groups with signal, by environment."""

    def __init__(self, oversample: Oversample) -> None:
        """Nothing was scored yet, and every group is expected to have signal."""
        self._oversample = oversample
        self.counts: dict[str, tuple[float, float]] = {}
        """Of each environment the decayed numbers of groups with signal, and of all."""

    def note(self, env: str, signal: bool) -> None:
        """A group was scored."""
        good, scored = self.counts.get(env, (0.0, 0.0))
        decay = 1 - 1 / MEMORY
        self.counts[env] = (good * decay + signal, scored * decay + 1)

    def groups(self, env: str, wanted: int, *, most: int, on_policy: bool) -> int:
        """Groups to have in flight for so many with signal, at most ``most`` unless more are wanted."""
        if wanted <= 0 or self._oversample == "off":
            return max(0, wanted)
        if not isinstance(self._oversample, str):
            return math.ceil(wanted * self._oversample)
        good, scored = self.counts.get(env, (0.0, 0.0))
        deviations = DEVIATIONS if on_policy else -DEVIATIONS
        share = (good + 1) / (scored + 1)

        def likely(groups: int) -> float:
            """Groups with signal, of so many, that there are with this probability; the share itself is uncertain."""
            variance = groups * share * (1 - share) * (1 + groups / (scored + 1))
            return groups * share - deviations * math.sqrt(max(0.0, variance))

        return bisect_left(range(max(wanted, most)), wanted - 0.5, lo=wanted, key=likely)
