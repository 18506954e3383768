"""Optimizer step: which ranks compute what, and in which order. The packer's weights are the only division."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

from tandem.config.loading import RunConfig
from tandem.metrics import Mean, Sum, Value, merge
from tandem.observability import trace
from tandem.optimizers.base import Optimizer
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.work import LocalWork, OldLogprobs
from tandem.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Metrics and logprobs of one forward and backward pass over a batch."""

    metrics: Mapping[str, Value]
    logprobs: Mapping[str, tuple[float, ...]]
    """The trainer's logprob of every trained token, by rollout id."""
    old_logprobs: Sequence[OldLogprobs] = ()
    """What later updates on the same batch take over, one for each micro-batch that this process computed."""


@dataclass(slots=True, kw_only=True)
class Step:
    """Computes gradients and applies them."""

    work: LocalWork
    """Passes over micro-batches and updates of the weights, on all ranks."""
    optimizer: Optimizer
    """Its learning rate schedule and clip."""
    steps: int
    """Steps of the whole run; schedules end there."""
    warm_steps: int = 0
    """Of these the first, on demonstrations; schedules begin anew after them."""
    warm_lr: float | None = None
    """Peak learning rate of these; None: the optimizer's."""
    updates_per_batch: int = 1
    beta: float | None = None
    """What a rollout's reward pays for each nat by which it is above the reference; None: nothing."""

    @classmethod
    def of(cls, config: RunConfig, work: LocalWork) -> Self:
        """The steps of a recipe."""
        return cls(
            work=work,
            optimizer=config.optimizer,
            steps=config.steps,
            warm_steps=config.warm_steps,
            warm_lr=config.warm_start.lr if config.warm_start is not None else None,
            updates_per_batch=config.updates_per_batch,
            beta=config.reference.beta if config.reference is not None and config.reference.in_reward else None,
        )

    async def packed(self, pack: Packer, groups: Sequence[Group], version: int) -> StepBatch:
        """Groups as micro-batches; where rewards pay for the KL to a reference, that is computed before advantages."""
        with trace.span("seconds/pack"):
            batch = pack(groups, version=version)
        if self.beta is None or batch.supervised:
            return batch
        penalties: dict[str, float] = defaultdict(float)
        divergences = await self.work.divergences(batch)
        for micro, of_micro in zip(batch.micro, divergences, strict=True):
            values = iter(of_micro)
            for rollout, num in micro.places:
                penalties[rollout] += self.beta * math.fsum(islice(values, num))
        with trace.span("seconds/pack"):
            batch = pack(groups, version=version, penalties=penalties)
        kl = Mean.of(value for of_micro in divergences for value in of_micro)
        return replace(batch, metrics={**batch.metrics, "kl_reference": kl})

    async def forward_backward(
        self, batch: StepBatch, queued: Callable[[], None] = lambda: None, *, old: Sequence[OldLogprobs] = ()
    ) -> StepStats:
        """Gradient of the step's loss, added up over its micro-batches.

        Args:
            batch: what to train on.
            queued: called when all is queued, and the host has nothing to do until the device is done.
            old: of the first pass over this batch; empty in it.
        """
        passed = await self.work.passed(batch, old, queued)
        logprobs: dict[str, list[float]] = {}
        for micro, of_micro in zip(batch.micro, passed.logprobs, strict=True):
            at = 0
            for rollout, num in micro.places:
                logprobs.setdefault(rollout, []).extend(of_micro[at : at + num])
                at += num
        return StepStats(
            metrics=merge([*passed.metrics, _never_clipped(batch, passed.metrics)]),
            logprobs={k: tuple(v) for k, v in logprobs.items()},
            old_logprobs=passed.old_logprobs,
        )

    async def apply(self, step: int, batch: StepBatch, first: StepStats) -> Mapping[str, Value]:
        """Update the weights in place, ``updates_per_batch`` times, and update a moving reference.

        Args:
            step: which optimizer step, from 1; all its updates share its learning rate.
            batch: what ``forward_backward`` was given.
            first: what it returned.
        """
        lr, most = self._rate(step), self.optimizer.max_grad_norm
        queued = [await self.work.every("apply", lr, most)]
        again: list[Mapping[str, Value]] = []
        for _ in range(0 if batch.supervised else self.updates_per_batch - 1):
            await self.work.every("fold")
            again.append((await self.forward_backward(batch, old=first.old_logprobs)).metrics)
            queued.append(await self.work.every("apply", lr, most))
        if (reference := self.work.reference) is not None:
            begins = step == self.warm_steps  # what the policy is to stay near is what the warm start has made
            if begins or (step > self.warm_steps and reference.due(step)):
                await self.work.every("fold")
                await self.work.every("begin" if begins else "move")
        norms = await self.work.policy.compute(self.work.norms, queued)
        reused = (_reused(metrics, norm) for metrics, norm in zip(again, norms[1:], strict=True))
        return {
            "grad_norm": Sum(norms[0]),
            "lr": Sum(lr),
            "optimizer/skipped": Sum(float(sum(not math.isfinite(norm) for norm in norms))),
            **merge(reused),
        }

    def _rate(self, step: int) -> float:
        """Learning rate of a step, by the schedule of the warm start or of what comes after it."""
        if step > self.warm_steps:
            return self.optimizer.rate(step - self.warm_steps, self.steps - self.warm_steps)
        lr = self.optimizer.lr if self.warm_lr is None else self.warm_lr
        return replace(self.optimizer, lr=lr).rate(step, self.warm_steps)


def _never_clipped(batch: StepBatch, metrics: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Trained tokens that are not computed, for lack of an advantage: no clip holds them, and shares count them."""
    left_out = batch.num_loss_tokens - sum(len(micro.targets_N) for micro in batch.micro)
    names = {name for values in metrics for name in values if name.startswith("clip_fraction")}
    return {name: Mean(0.0, left_out) for name in names} if left_out else {}


def _reused(metrics: Mapping[str, Value], norm: float) -> dict[str, Value]:
    """Metrics of a later update, under names of their own: those of the first compare sampling with training."""
    loss = metrics.get("loss")
    means = {"loss": Mean(loss.value, 1), "grad_norm": Mean(norm, 1)} if isinstance(loss, Sum) else {}
    return {f"reused/{name}": value for name, value in {**metrics, **means}.items()}
