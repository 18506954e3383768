"""The correction contract: a weight for every token, by how far its sampler was from the policy."""

from __future__ import annotations

import math
from typing import Literal, Protocol

from tandem.algorithms.losses.base import MOST_LOG_RATIO, MicroBatch
from tandem.lazy import Tensor, torch

Beyond = Literal["truncate", "mask"]
"""For a ratio out of bounds: set it to the bound, or set the weight to 0."""


class Correction(Protocol):
    """A frozen dataclass whose fields are its options.

    A property ``needs_recomputed`` is optional: true if its weights are ratios, which a loss against the sampler's
    logprobs already contains. So is the class variable ``weighs``, false if it only masks what the policy left behind.
    """

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
        """Weight of each token's loss, float32 without gradient, given the policy's ``logprobs_N``."""


def drift(logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
    """Log ratio of the policy to the sampler, for each token.

    The policy is that of the start of the step if its logprobs were recomputed (the loss covers the rest), else the
    current one.
    """
    policy_N = logprobs_N.detach() if micro.recomputed_logprobs_N is None else micro.recomputed_logprobs_N
    return policy_N - micro.behavior_logprobs_N


class Interval:
    """Base of corrections that hold ratios within bounds around 1, their options ``low`` and ``high``."""

    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a bound and 1 lies within."""
        if self.low is None and self.high is None:
            raise ValueError("high must be given where low is null: without bounds nothing is corrected")
        if self.low is not None and not 0 < self.low <= 1:
            raise ValueError("low must be above 0 and at most 1, or null")
        if self.high is not None and not 1 <= self.high < math.inf:
            raise ValueError("high must be at least 1 and finite, or null")

    def within(self, ratio: Tensor) -> Tensor:
        """True where a ratio lies within the bounds."""
        return (ratio >= (self.low or 0.0)) & (ratio <= (math.inf if self.high is None else self.high))


class BoundedRatio(Interval):
    """Base of corrections whose weights are ratios of policy to sampler."""

    beyond: Beyond

    @property
    def needs_recomputed(self) -> bool:
        """A truncated ratio is a weight."""
        return self.beyond == "truncate"

    def bounded(self, log_ratio: Tensor, micro: MicroBatch) -> Tensor:
        """Ratios within bounds; 1 for each if the loss itself is against the sampler."""
        ratio = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        if self.beyond == "truncate":
            return ratio.clamp(self.low, self.high)
        weights = torch.ones_like(ratio) if micro.recomputed_logprobs_N is None else ratio
        return torch.where(self.within(ratio), weights, 0.0)
