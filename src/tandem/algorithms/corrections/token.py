"""Token-level importance weights, truncated or masked."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.corrections.base import Beyond, BoundedRatio, drift
from tandem.algorithms.losses.base import MicroBatch
from tandem.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenCorrection(BoundedRatio):
    """w = policy / sampler, token by token, held within [low, high] or dropped beyond it.

    Truncated it is TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"),
    masked MIS or IcePop (arXiv 2510.18855). With old_logprobs: sampled the loss already contains this ratio, so only
    mask is allowed, with weight 1 within the bounds.
    """

    beyond: Beyond = "truncate"
    """truncate: a ratio out of bounds counts as the bound; mask: the token is left out."""
    low: float | None = None
    """Smallest ratio, at most 1; null: none."""
    high: float | None = 2.0
    """Largest ratio, at least 1; null: none."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
        """Bounded ratios."""
        return self.bounded(drift(logprobs_N, micro), micro)
