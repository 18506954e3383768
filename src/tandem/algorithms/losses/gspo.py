"""GSPO: the clipped policy gradient with one ratio for a whole answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.algorithms.losses.base import MicroBatch, Reduction, TokenLoss, clipped, ratio
from tandem.errors import Bounded, bounded
from tandem.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Gspo(Bounded):
    """GSPO (arXiv 2507.18071): the ratio of an answer is the geometric mean of its tokens' ratios.

    With s = exp(mean over the answer's tokens of logprob - old logprob) the objective is min(s A, clip(s, 1 - clip_low,
    1 + clip_high) A); the loss is its negative, for every token of the answer. The clips are far narrower than those of
    a token's ratio, since means hardly move; the defaults are the paper's.
    """

    by_advantage: ClassVar[bool] = True
    at_ratio_one: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    clip_low: float = bounded(3e-4, most=1)
    """An answer of negative advantage stops pushing once its ratio is below 1 - clip_low."""
    clip_high: float = bounded(4e-4)
    """An answer of positive advantage stops pushing once its ratio is above 1 + clip_high."""
    reduction: Reduction = "sequence"
    """sequence: mean over answers, as in the paper; token: longer answers weigh more; constant: see grpo."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss; its sum over an answer has the gradient of the answer's own objective times its length."""
        ratio_N = ratio(micro.means(logprobs_N - micro.old_logprobs_N))[micro.sample_N]
        loss_N, metrics = clipped(ratio_N, micro.advantages_N, self.clip_low, self.clip_high, None)
        return TokenLoss(loss_N=loss_N, metrics=metrics)
