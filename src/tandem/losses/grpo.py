"""The clipped policy gradient of PPO and GRPO, with separate clips and a dual clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.losses.base import MicroBatch, Reduction, TokenLoss
from tandem.metrics import Max, Mean, Value

_MOST = 80.0
"""Log ratios are held within this, so that exp stays finite in float32; beyond it every ratio is absurd alike."""


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """GRPO's surrogate (arXiv 2402.03300), per token, against the policy that sampled it.

    With r = exp(logprob - behavior logprob) the objective is min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and
    where A < 0 at least dual_clip A (arXiv 1912.09729); the loss is its negative. The higher clip_high is DAPO's
    (arXiv 2503.14476).
    """

    clip_low: float = 0.2
    """A token of negative advantage stops pushing once its ratio is below 1 - clip_low."""
    clip_high: float = 0.28
    """A token of positive advantage stops pushing once its ratio is above 1 + clip_high."""
    dual_clip: float | None = 3.0
    """A token of negative advantage stops pushing once its ratio is above this, as stale ones may be; null never."""
    reduction: Reduction = "token"
    """token: mean over the step's trained tokens; sequence: over samples, each a mean over its tokens; constant: sum
    over tokens, divided by samples times max_tokens (Dr. GRPO)."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError("clip_low must be between 0 and 1")
        if not 0 <= self.clip_high < math.inf:
            raise ValueError("clip_high must be at least 0 and finite")
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError("dual_clip must be above 1 and finite, or null")

    def __call__(self, logprobs_N: Tensor, micro: MicroBatch) -> TokenLoss:
        """Per-token loss; the gradient is -r A where nothing clips and exactly 0 where something does."""
        advantages_N = micro.advantages_N
        gap_N = logprobs_N - micro.behavior_logprobs_N
        ratio_N = gap_N.clamp(-_MOST, _MOST).exp()
        # The ratio is clamped, not the loss: where a clamp binds, its gradient is 0 and nothing infinite meets a 0.
        high = math.inf if self.dual_clip is None else self.dual_clip
        lowest_N = torch.where(advantages_N < 0, 1.0 - self.clip_low, 0.0)
        highest_N = torch.where(advantages_N < 0, high, 1.0 + self.clip_high)
        loss_N = -advantages_N * ratio_N.clamp(lowest_N, highest_N)
        with torch.no_grad():
            clipped_N = ((ratio_N < lowest_N) | (ratio_N > highest_N)) & (advantages_N != 0)
            metrics = _metrics(gap_N, ratio_N, clipped_N)
        return TokenLoss(loss_N=loss_N, metrics=metrics)


def _metrics(gap_N: Tensor, ratio_N: Tensor, clipped_N: Tensor) -> dict[str, Value]:
    """What the step reports, with one wait for the device.

    kl_behavior estimates KL(behavior || policy) from the behaviour's own samples: the mean of r - 1 - log r, which is
    never negative (k3 of http://joschu.net/blog/kl-approx.html).
    """
    n = gap_N.numel()
    if n == 0:
        return {}
    k3_N = torch.expm1(gap_N.clamp(-_MOST, _MOST)) - gap_N
    sums = torch.stack([ratio_N.sum(), k3_N.sum(), clipped_N.float().sum(), ratio_N.max(), gap_N.abs().max()])
    ratio, k3, clipped, ratio_max, gap_max = sums.tolist()
    return {
        "ratio": Mean(ratio, n),
        "ratio/max": Max(ratio_max),
        "clip_fraction": Mean(clipped, n),
        "kl_behavior": Mean(k3, n),
        "logprob_gap/max": Max(gap_max),
    }
