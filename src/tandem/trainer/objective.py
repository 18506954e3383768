"""The objective per token: the loss, weighed by corrections, plus the penalty of a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tandem.algorithms.corrections.base import Correction
from tandem.algorithms.losses.base import Loss, MicroBatch, TokenLoss
from tandem.algorithms.references.base import Reference
from tandem.config import registry as resolve
from tandem.config.loading import RunConfig, loss_reference
from tandem.errors import ConfigError
from tandem.metrics import Max, Mean, Share, Value
from tandem.pending import Pending, PendingMetrics
from tandem.types import UNKNOWN_LOGPROB

_MOST = 80.0
"""Log ratios are held within this, so that exp stays finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogprobs:
    """Old and reference logprobs of a micro-batch, which stay the same over the updates of its step."""

    recomputed_logprobs_N: Tensor
    """The policy's, when the step began."""
    ref_logprobs_N: Tensor | None
    """The reference's, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with its corrections and its reference penalty; it never reduces."""

    loss: Loss
    corrections: tuple[Correction, ...] = ()
    """Whose weights are multiplied with one another and with the loss, but not with the penalty."""
    recomputed: bool = False
    """Ratios are against the policy as the step began (decoupled), else against the sampler (direct)."""
    reference: Reference | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The objective that a recipe's step minimises."""
        return cls(
            loss=config.loss,
            corrections=config.corrections,
            recomputed=config.old_logprobs == "recomputed",
            reference=loss_reference(config),
        )

    def __call__(self, logprobs_N: Tensor, batch: MicroBatch, old: OldLogprobs) -> tuple[Tensor, PendingMetrics]:
        """What each token costs, float32 and differentiable, and the metrics of it."""
        micro = self.informed(batch, old)
        output = self.loss(logprobs_N, micro)
        _check_loss(self.loss, output, logprobs_N)
        metrics: dict[str, Value | Pending] = {**output.metrics, **mismatch(logprobs_N.detach(), micro)}
        cost_N = output.loss_N
        if self.corrections:
            weights_N, of_corrections = self.weights(logprobs_N.detach(), micro)
            cost_N = cost_N * weights_N
            metrics |= of_corrections
        if self.reference is not None:
            penalty_N, kl_N = self.reference.divergence(logprobs_N, micro)
            cost_N = cost_N + self.reference.beta * penalty_N
            metrics["kl_reference"] = Pending(Mean, kl_N.sum(), kl_N.numel())
        return cost_N, metrics

    def informed(self, batch: MicroBatch, old: OldLogprobs) -> MicroBatch:
        """The micro-batch with old and reference logprobs; one that the sampler did not record is the policy's."""
        recorded_N = batch.behavior_logprobs_N
        return dataclasses.replace(
            batch,
            behavior_logprobs_N=torch.where(recorded_N == UNKNOWN_LOGPROB, old.recomputed_logprobs_N, recorded_N),
            recomputed_logprobs_N=old.recomputed_logprobs_N if self.recomputed else None,
            ref_logprobs_N=old.ref_logprobs_N,
        )

    def weights(self, logprobs_N: Tensor, micro: MicroBatch) -> tuple[Tensor, PendingMetrics]:
        """Product of the corrections' weights; how large it is, and the share of tokens that each one drops."""
        whole_N = torch.ones_like(logprobs_N)
        metrics: dict[str, Value | Pending] = {}
        n = logprobs_N.numel()
        for correction in self.corrections:
            weights_N = correction(logprobs_N, micro)
            _check_shape(f"correction {resolve.kind_of('corrections', correction)}", weights_N, logprobs_N)
            dropped = (weights_N == 0).sum()
            metrics[f"correction/{resolve.kind_of('corrections', correction)}/masked"] = Pending(Mean, dropped, n)
            whole_N = whole_N * weights_N
        total = whole_N.sum()
        metrics["correction/weight"] = Pending(Mean, total, n)
        metrics["correction/masked"] = Pending(Mean, (whole_N == 0).sum(), n)
        metrics["correction/ess"] = Pending(Share, total, whole_N.square().sum(), n)
        return whole_N, metrics


def _check_loss(loss: Loss, output: object, logprobs_N: Tensor) -> None:
    """See that a loss, which may be a user's own, is one differentiable number per token.

    Raises:
        ConfigError: it is not.
    """
    name = f"loss {resolve.kind_of('losses', loss)}"
    if not isinstance(output, TokenLoss):
        raise ConfigError(f"{name} returned a {type(output).__name__}; expected tandem.TokenLoss(loss_N=...)")
    _check_shape(name, output.loss_N, logprobs_N)
    metrics: Mapping[str, object] = output.metrics
    for metric, value in metrics.items():
        if isinstance(value, int | float | Tensor):
            raise ConfigError(
                f"{name} has the metric {metric!r} as a {type(value).__name__}; expected what adds up over "
                "micro-batches, such as tandem.pending.Pending(tandem.metrics.Mean, total, count)"
            )
    if logprobs_N.requires_grad and not output.loss_N.requires_grad:
        raise ConfigError(f"{name} does not depend on logprobs_N, or detaches it, so nothing would be learned")


def _check_shape(name: str, values_N: Tensor, logprobs_N: Tensor) -> None:
    """See that there is one number per token; any other shape would be stretched to one without a word.

    Raises:
        ConfigError: there is not.
    """
    if values_N.shape != logprobs_N.shape:
        raise ConfigError(
            f"{name} returned a tensor of shape {tuple(values_N.shape)}; expected {tuple(logprobs_N.shape)}, one "
            "number for each trained token: never sum or average, the step alone divides"
        )


def mismatch(logprobs_N: Tensor, micro: MicroBatch) -> PendingMetrics:
    """Metrics of the distance between the policy and the policy that sampled its tokens.

    kl_behavior estimates KL(behavior || policy) from the behaviour's own samples: the mean of r - 1 - log r, which is
    never negative (k3 of http://joschu.net/blog/kl-approx.html). ess is the effective sample size of the ratios as a
    share of the tokens: (sum r)^2 / (n sum r^2), 1 where all are alike. logprob/positive and /negative are the policy's
    mean logprobs of tokens with positive and with negative advantage: training is to draw them apart.
    """
    n = logprobs_N.numel()
    if n == 0:
        return {}
    better_N, worse_N = micro.advantages_N > 0, micro.advantages_N < 0
    gap_N = logprobs_N - micro.behavior_logprobs_N
    held_N = gap_N.clamp(-_MOST, _MOST)
    ratio_N = held_N.double().exp()
    return {
        "kl_behavior": Pending(Mean, (torch.expm1(held_N) - gap_N).double().sum(), n),
        "logprob_gap/max": Pending(Max, gap_N.abs().max()),
        "ess": Pending(Share, ratio_N.sum(), ratio_N.square().sum(), n),
        "logprob/positive": Pending(Mean, (logprobs_N * better_N).double().sum(), better_N.sum()),
        "logprob/negative": Pending(Mean, (logprobs_N * worse_N).double().sum(), worse_N.sum()),
    }
