"""Off-policy sequence masking: drops negative-advantage samples whose KL to the sampler exceeds a threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.algorithms.losses.base import MicroBatch
from tandem.errors import Bounded, bounded
from tandem.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Opsm(Bounded):
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556): w = 0 where A < 0 and KL > threshold, else 1.

    KL is the mean over an answer's tokens of the sampler's logprob minus the current policy's. A policy learns
    little from mistakes that it would no longer make, and pushing them away disturbs it.
    """

    weighs: ClassVar[bool] = False

    threshold: float = bounded(0.5)
    """Nats per token."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
        """Weight of each token: 1 if it is kept, 0 if it is masked."""
        kl = micro.means(micro.behavior_logprobs_N - logprobs_N.detach())
        return ((micro.advantages_N >= 0) | (kl[micro.sample_N] <= self.threshold)).to(logprobs_N.dtype)
