"""CISPO: a policy gradient with capped importance weights, so that no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.algorithms.losses.base import MicroBatch, Reduction, TokenLoss, counts, ratio
from tandem.errors import Bounded, bounded
from tandem.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Cispo(Bounded):
    """CISPO (arXiv 2506.13585, equation 4): loss = -w A logprob, with w = min(r, cap) held constant.

    r = exp(logprob - old logprob). A clip would silence the rare tokens whose ratio moves most; a cap only limits their
    weight. The default cap is that of ScaleRL (arXiv 2510.13786).
    """

    by_advantage: ClassVar[bool] = True

    cap: float = bounded(5.0, above=0)
    """Largest importance weight of a token."""
    reduction: Reduction = "token"
    """token: mean over the step's trained tokens; sequence, constant: see grpo."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss; the gradient is -min(r, cap) A."""
        with torch.no_grad():
            ratio_N = ratio(logprobs_N - micro.old_logprobs_N)
            above_N = (ratio_N > self.cap) & (micro.advantages_N != 0)
            metrics = counts(ratio_N, torch.zeros_like(above_N), above_N)
        loss_N = -ratio_N.clamp(max=self.cap) * micro.advantages_N * logprobs_N
        return TokenLoss(loss_N=loss_N, metrics=metrics)
