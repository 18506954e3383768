"""Importance ratios, their clipping, and the metrics of both."""

from __future__ import annotations

import math

from tandem.algorithms.losses.base import MOST_LOG_RATIO
from tandem.lazy import Tensor, torch
from tandem.metrics import Max, Mean
from tandem.pending import Pending, PendingMetrics


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio clamped to stay finite; its gradient is 0 where it is clamped."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def clipped(
    ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, PendingMetrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), where A < 0 at most -dual A, and the shares that were clipped."""
    # The ratio is clamped, not the loss: where a clamp binds, its gradient is 0 and nothing infinite meets a 0.
    most = math.inf if dual is None else dual
    lowest_N = torch.where(advantages_N < 0, 1.0 - low, 0.0)
    highest_N = torch.where(advantages_N < 0, most, 1.0 + high)
    loss_N = -advantages_N * ratio_N.clamp(lowest_N, highest_N)
    with torch.no_grad():
        moves_N = advantages_N != 0
        below_N, above_N = (ratio_N < lowest_N) & moves_N, (ratio_N > highest_N) & moves_N
        return loss_N, counts(ratio_N, below_N, above_N)


def counts(ratio_N: Tensor, below_N: Tensor, above_N: Tensor) -> PendingMetrics:
    """Mean and largest ratio, and the shares of tokens that lost their gradient to a bound."""
    n = ratio_N.numel()
    if n == 0:
        return {}
    ratio_N = ratio_N.detach()
    below, above = below_N.sum(), above_N.sum()
    return {
        "ratio": Pending(Mean, ratio_N.sum(), n),
        "ratio/max": Pending(Max, ratio_N.max()),
        "clip_fraction": Pending(Mean, below + above, n),
        "clip_fraction/low": Pending(Mean, below, n),
        "clip_fraction/high": Pending(Mean, above, n),
    }
