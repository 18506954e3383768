"""SAPO: a policy gradient with a soft gate instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.algorithms.losses.base import MicroBatch, Reduction, TokenLoss, counts, ratio
from tandem.errors import Bounded, bounded
from tandem.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Sapo(Bounded):
    """SAPO (arXiv 2511.20347): loss = -A (4 / t) sigmoid(t (r - 1)), with t by the sign of A.

    r = exp(logprob - old logprob). At r = 1 the gradient is that of -r A; away from it, it fades on both sides instead
    of being cut off, faster for a larger t. Negative advantages spread over the whole vocabulary, so their t is
    larger.
    """

    by_advantage: ClassVar[bool] = True
    at_ratio_one: ClassVar[tuple[str, ...]] = ("temperature_positive", "temperature_negative")

    temperature_positive: float = bounded(1.0, above=0)
    """t of tokens of positive advantage."""
    temperature_negative: float = bounded(1.05, above=0)
    """t of tokens of negative advantage."""
    reduction: Reduction = "sequence"
    """sequence: mean over answers, each a mean over its tokens, as in the paper; token, constant: see grpo."""

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss; a token counts as clipped if less than half of its gradient is left."""
        ratio_N = ratio(logprobs_N - micro.old_logprobs_N)
        t_N = torch.where(micro.advantages_N > 0, self.temperature_positive, self.temperature_negative)
        x_N = t_N * (ratio_N - 1)
        # The derivative is gate (1 - gate), which loses its digits in float32 where the gate itself is near 1.
        gate_N = torch.where(x_N > 0, 1 - torch.sigmoid(-x_N), torch.sigmoid(x_N))
        with torch.no_grad():
            faded_N = (4 * gate_N * (1 - gate_N) < 0.5) & (micro.advantages_N != 0)
            metrics = counts(ratio_N, faded_N & (ratio_N < 1), faded_N & (ratio_N > 1))
        return TokenLoss(loss_N=-micro.advantages_N * 4 / t_N * gate_N, metrics=metrics)
