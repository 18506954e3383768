"""Sequence-level importance weights, truncated or masked."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.corrections.base import Beyond, BoundedRatio, drift
from tandem.algorithms.losses.base import MicroBatch
from tandem.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Sequence(BoundedRatio):
    """w = product over an answer's tokens of policy / sampler, held within [low, high] or dropped beyond it.

    The unbiased weight of an answer (Liu et al. 2025, "When speed kills stability"). Products of many ratios explode:
    for long answers prefer token or geometric. With old_logprobs: sampled the loss already contains this ratio,
    so only mask is allowed, with weight 1 within the bounds.
    """

    beyond: Beyond = "mask"
    """truncate: a product out of bounds counts as the bound; mask: the answer is left out."""
    low: float | None = None
    """Smallest product, at most 1; null: none."""
    high: float | None = 3.0
    """Largest product, at least 1; null: none."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
        """Bounded products, the same for all tokens of an answer."""
        return self.bounded(micro.totals(drift(logprobs_N, micro)), micro)[micro.sample_N]
