"""Optimizer step: which ranks compute what, and in which order. The packer's weights are the only division."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from torch import Tensor

from tandem.metrics import Mean, Sum, Value, merge
from tandem.optimizers.base import Optimizer
from tandem.pending import PendingMetrics
from tandem.trainer.objective import OldLogprobs
from tandem.trainer.pack import StepBatch
from tandem.trainer.work import LocalWork


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Metrics and logprobs of one forward and backward pass over a batch."""

    metrics: Mapping[str, Value]
    logprobs: Mapping[str, tuple[float, ...]]
    """The trainer's logprob of every trained token, by rollout id."""
    old_logprobs: Sequence[OldLogprobs] = ()
    """What later updates on the same batch take over, one for each micro-batch that this process computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPass:
    """What one pass over a batch measured."""

    metrics: Sequence[Mapping[str, Value]]
    """Of each micro-batch, in the batch's order."""
    logprobs: Sequence[Sequence[float]]
    """Of the trained tokens of each."""
    old_logprobs: Sequence[OldLogprobs]
    """Of those that this process computed."""


class Crew(Protocol):
    """The ranks that compute a step. Each call is executed by all of them, one call at a time."""

    async def passed(self, batch: StepBatch, old: Sequence[OldLogprobs], queued: Callable[[], None]) -> BatchPass:
        """Forward and backward over all micro-batches.

        Args:
            batch: what to train on.
            old: of the step's first pass; empty in it.
            queued: called when all is queued, and the host has nothing to do until the device is done.
        """
        ...

    async def apply(self, lr: float, max_grad_norm: float) -> Tensor:
        """Update the weights; the gradient's norm over all ranks."""
        ...

    async def norms(self, queued: Sequence[Tensor]) -> list[float]:
        """Copy the queued gradient norms to the host."""
        ...

    async def fold(self) -> None:
        """Bring what the model computes with up to date with what the optimizer wrote."""
        ...

    async def move(self) -> None:
        """Have the reference follow the policy."""
        ...


class SingleRank:
    """A crew of this process alone."""

    def __init__(self, work: LocalWork):
        self._work = work
        self._compute = work.policy.compute

    async def passed(self, batch: StepBatch, old: Sequence[OldLogprobs], queued: Callable[[], None]) -> BatchPass:
        """Once over all micro-batches; the host waits for the device when all are queued, and not before."""
        work = self._work
        work.hook()
        passes: list[tuple[PendingMetrics, Tensor]] = []
        old_logprobs: list[OldLogprobs] = []
        for micro, before in zip(batch.micro, old or repeat(None), strict=bool(old)):
            # One call for each micro-batch: an engine on the same thread gets its turn in between.
            pending, logprobs_N, now = await self._compute(work.micro, micro, before)
            passes.append((pending, logprobs_N))
            old_logprobs.append(now)
        queued()
        metrics, values = await self._compute(work.settle, passes)
        return BatchPass(metrics=metrics, logprobs=values, old_logprobs=old_logprobs)

    async def apply(self, lr: float, max_grad_norm: float) -> Tensor:
        """Update the weights on the compute thread."""
        return await self._compute(self._work.apply, lr, max_grad_norm)

    async def norms(self, queued: Sequence[Tensor]) -> list[float]:
        """Copy the queued gradient norms to the host, on the compute thread."""
        return await self._compute(self._work.norms, queued)

    async def fold(self) -> None:
        """Fold the trained parameters into the model, on the compute thread."""
        await self._compute(self._work.fold)

    async def move(self) -> None:
        """Have the reference follow the policy, on the compute thread."""
        await self._compute(self._work.move)


@dataclass(slots=True, kw_only=True)
class Step:
    """Computes gradients and applies them."""

    work: LocalWork
    optimizer: Optimizer
    """Its learning rate schedule and clip."""
    steps: int
    """Of the whole run; schedules end there."""
    updates_per_batch: int = 1
    crew: Crew | None = None
    """All ranks; None: this process is the only one."""

    @property
    def _ranks(self) -> Crew:
        if self.crew is None:
            self.crew = SingleRank(self.work)
        return self.crew

    async def forward_backward(self, batch: StepBatch, queued: Callable[[], None] = lambda: None) -> StepStats:
        """Gradient of the step's loss, added up over its micro-batches.

        Args:
            batch: what to train on.
            queued: called when all is queued, and the host has nothing to do until the device is done.
        """
        return await self._pass(batch, (), queued)

    async def _pass(
        self, batch: StepBatch, old: Sequence[OldLogprobs], queued: Callable[[], None] = lambda: None
    ) -> StepStats:
        passed = await self._ranks.passed(batch, old, queued)
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
        lr, most = self.optimizer.rate(step, self.steps), self.optimizer.max_grad_norm
        queued = [await self._ranks.apply(lr, most)]
        again: list[Mapping[str, Value]] = []
        for _ in range(self.updates_per_batch - 1):
            await self._ranks.fold()
            again.append((await self._pass(batch, first.old_logprobs)).metrics)
            queued.append(await self._ranks.apply(lr, most))
        if self.work.held is not None and self.work.held.due(step):
            await self._ranks.fold()
            await self._ranks.move()
        norms = await self._ranks.norms(queued)
        reused = (_reused(metrics, norm) for metrics, norm in zip(again, norms[1:], strict=True))
        return {
            "grad_norm": Sum(norms[0]),
            "lr": Sum(lr),
            "optimizer/skipped": Sum(float(sum(not math.isfinite(norm) for norm in norms))),
            **merge(reused),
        }


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
