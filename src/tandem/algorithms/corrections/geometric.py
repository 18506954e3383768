"""Geometric-mean masking: drops answers whose sampler differed too much from the policy, whatever their length."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.corrections.base import Interval, drift
from tandem.algorithms.losses.base import MicroBatch
from tandem.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Geometric(Interval):
    """w = 1 if the geometric mean over an answer's tokens of policy / sampler is within [low, high], else 0.

    Unlike the product of ``sequence`` it does not grow with length (Liu et al. 2025, "When speed kills stability"). It
    is not an importance weight, so it only masks; combine it with ``token``.
    """

    low: float | None = 0.99
    """Smallest mean ratio, at most 1; null: none."""
    high: float | None = 1.01
    """Largest mean ratio, at least 1; null: none."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
        """1 or 0, the same for all tokens of an answer."""
        mean = micro.means(drift(logprobs_N, micro)).exp()
        return self.within(mean).to(logprobs_N.dtype)[micro.sample_N]
