"""GRPO and PPO: the clipped policy gradient, with separate clips and a dual clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.algorithms.losses.base import MicroBatch, Reduction, TokenLoss, clipped, ratio
from tandem.errors import Bounded, bounded
from tandem.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Grpo(Bounded):
    """GRPO's surrogate (arXiv 2402.03300), per token, against the policy that sampled it.

    With r = exp(logprob - old logprob) the objective is min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and
    where A < 0 at least dual_clip A (arXiv 1912.09729); the loss is its negative. The higher clip_high is DAPO's
    (arXiv 2503.14476). By ``reduction`` it is GRPO (sequence), DAPO and BNPO (token) or Dr. GRPO (constant).
    """

    by_advantage: ClassVar[bool] = True
    at_ratio_one: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")

    clip_low: float = bounded(0.2, most=1)
    """A token of negative advantage stops pushing once its ratio is below 1 - clip_low."""
    clip_high: float = bounded(0.28)
    """A token of positive advantage stops pushing once its ratio is above 1 + clip_high."""
    dual_clip: float | None = bounded(3.0, above=1)
    """A token of negative advantage stops pushing once its ratio is above this, as stale ones may be; null: never."""
    reduction: Reduction = "token"
    """token: mean over the step's trained tokens; sequence: over samples, each a mean over its tokens; constant: sum
    over tokens, divided by samples times max_tokens (Dr. GRPO)."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss; the gradient is -r A, or exactly 0 where it is clipped."""
        ratio_N = ratio(logprobs_N - micro.old_logprobs_N)
        loss_N, metrics = clipped(ratio_N, micro.advantages_N, self.clip_low, self.clip_high, self.dual_clip)
        return TokenLoss(loss_N=loss_N, metrics=metrics)
