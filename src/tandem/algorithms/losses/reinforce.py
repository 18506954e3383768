"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.algorithms.losses.base import MicroBatch, Reduction, TokenLoss, counts, ratio
from tandem.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """REINFORCE (Williams 1992): loss = -A logprob, for tokens that the policy itself has just sampled.

    It has no ratio to an older policy. If tokens are stale or the engine computes differently, weight them by
    ``corrections``.
    """

    by_advantage: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    reduction: Reduction = "token"
    """token: mean over the step's trained tokens; sequence, constant: see grpo."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss; the gradient is -A."""
        with torch.no_grad():
            none_N = torch.zeros_like(logprobs_N, dtype=torch.bool)
            metrics = counts(ratio(logprobs_N - micro.old_logprobs_N), none_N, none_N)
        return TokenLoss(loss_N=-micro.advantages_N * logprobs_N, metrics=metrics)
