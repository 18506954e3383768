"""One optimizer step: per-token losses in, one gradient out. The only place that divides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.losses.base import Loss, MicroBatch
from tandem.metrics import Sum, Value, merge
from tandem.optimizers.base import Optimizer, Stepper
from tandem.policy.logprobs import token_logprobs
from tandem.policy.policy import Policy
from tandem.telemetry import trace
from tandem.trainer.pack import Micro, StepBatch
from tandem.types import UNKNOWN, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What forward and backward found."""

    metrics: Mapping[str, Value]
    """Of the objective."""
    logprobs: Mapping[str, tuple[float, ...]]
    """The trainer's logprob of every trained token, by rollout id."""


@dataclass(slots=True, kw_only=True)
class Step:
    """Computes gradients and applies them."""

    policy: Policy
    """What is trained."""
    loss: Loss
    """Per token."""
    optimizer: Optimizer
    """Its learning rate schedule and clip."""
    stepper: Stepper
    """The optimizer bound to the trained parameters."""
    sampling: Sampling
    """Its support limits (top_p, top_k, min_p) are part of the distribution that was sampled."""
    steps: int
    """Of the whole run; schedules end there."""
    _hooked: bool = field(default=False)

    def hook(self) -> None:
        """Hand every gradient to the stepper as soon as backward has made it, so that none of model size piles up."""
        if not self._hooked:
            for parameter in self.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.stepper.accumulate)
            self._hooked = True

    async def forward_backward(self, batch: StepBatch) -> StepStats:
        """Gradient of the step's loss, added up over its micro-batches."""
        self.hook()
        metrics: list[Mapping[str, Value]] = []
        logprobs: dict[str, list[float]] = {}
        for micro in batch.micro:
            # One call for each micro-batch: an engine on the same thread gets its turn in between.
            found, values = await self.policy.compute(self._micro, micro)
            metrics.append(found)
            at = 0
            for rollout, num in micro.places:
                logprobs.setdefault(rollout, []).extend(values[at : at + num])
                at += num
        return StepStats(metrics=merge(metrics), logprobs={k: tuple(v) for k, v in logprobs.items()})

    async def apply(self, step: int) -> Mapping[str, Value]:
        """Clip and update the weights in place, as optimizer step ``step`` (from 1)."""
        lr = self.optimizer.rate(step, self.steps)
        norm = await self.policy.compute(self._apply, lr)
        return {
            "grad_norm": Sum(norm),
            "lr": Sum(lr),
            "optimizer/skipped": Sum(0.0 if math.isfinite(norm) else 1.0),
        }

    @trace.span("seconds/optimizer")
    def _apply(self, lr: float) -> float:
        return self.stepper.step(lr, self.optimizer.max_grad_norm)

    @trace.span("seconds/forward_backward")
    def _micro(self, micro: Micro) -> tuple[Mapping[str, Value], list[float]]:
        logprobs_N = self.logprobs(micro)
        token_loss = self.loss(logprobs_N, _with_known_logprobs(micro.batch, logprobs_N.detach()))
        loss = (token_loss.loss_N * micro.weights_N).sum()
        loss.backward()
        return {**token_loss.metrics, "loss": Sum(loss.item())}, logprobs_N.tolist()

    def logprobs(self, micro: Micro) -> Tensor:
        """Logprob of each trained token, float32, as it was sampled: at its temperature and within its support."""
        head = self.policy.head
        hidden_TH = self.policy.hidden(micro.tokens_T[None], micro.positions_T[None], micro.plan)[0]
        logprobs_N, _ = token_logprobs(
            hidden_TH.index_select(0, micro.predict_N),
            head.weight,
            micro.targets_N,
            micro.temperature_N,
            bias=head.bias,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
        )
        return logprobs_N


def _with_known_logprobs(batch: MicroBatch, policy_N: Tensor) -> MicroBatch:
    """Where the sampler did not tell its logprobs, the policy's own stand in: the ratio of such a token is 1."""
    told_N = batch.behavior_logprobs_N
    return dataclasses.replace(batch, behavior_logprobs_N=torch.where(told_N == UNKNOWN, policy_N, told_N))
