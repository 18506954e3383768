"""A step's work on its ranks, here one: passes over micro-batches, and updates of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, Self

import torch
from torch import Tensor

from tandem import machine
from tandem.algorithms.references.base import ReferenceWeights
from tandem.config.loading import RunConfig
from tandem.distributed.context_parallel import ContextPart, WholeRow
from tandem.metrics import Mean, Sum, Value
from tandem.model.logprobs import token_logprobs
from tandem.model.policy import Policy
from tandem.observability import trace
from tandem.optimizers.base import Stepper
from tandem.pending import Pending, PendingMetrics, fetch, settle
from tandem.trainer.objective import Objective, OldLogprobs
from tandem.trainer.pack import Micro, StepBatch
from tandem.types import UNKNOWN_LOGPROB, Sampling

Verb = Literal["apply", "fold", "move"]
"""What every rank of a step does in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPass:
    """What one pass over a batch measured."""

    metrics: Sequence[Mapping[str, Value]]
    """Of each micro-batch, in the batch's order."""
    logprobs: Sequence[Sequence[float]]
    """Of the trained tokens of each."""
    old_logprobs: Sequence[OldLogprobs]
    """Of those that this process computed."""


@dataclass(slots=True, kw_only=True)
class LocalWork:
    """The work of one rank; all but ``passed`` and ``every`` runs on its compute thread.

    ``ranks/work.py`` has that of one of several ranks, and that of the rank that leads them.
    """

    policy: Policy
    objective: Objective
    stepper: Stepper
    """The optimizer bound to the trained parameters."""
    sampling: Sampling
    """Its support limits (top_p, top_k, min_p) are part of the distribution that was sampled."""
    reference: ReferenceWeights | None = None
    """The reference's weights, where the objective has a reference."""
    fold: Callable[[], None] = lambda: None
    """Brings what the model computes with up to date with what the optimizer wrote."""
    tile: int | None = None
    """Most logits held at once; None: as fits the device."""
    _hooked: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls, config: RunConfig, policy: Policy, stepper: Stepper, reference: ReferenceWeights | None, **of_ranks: Any
    ) -> Self:
        """The work of a recipe's steps."""
        return cls(
            policy=policy,
            objective=Objective.of(config),
            stepper=stepper,
            sampling=config.sampling,
            reference=reference,
            fold=lambda: config.trainable.fold(policy.model),
            **of_ranks,
        )

    async def passed(self, batch: StepBatch, old: Sequence[OldLogprobs], queued: Callable[[], None]) -> BatchPass:
        """Forward and backward over all micro-batches; the host waits for the device when all are queued.

        Args:
            batch: what to train on.
            old: of the step's first pass; empty in it.
            queued: called when all is queued, and the host has nothing to do until the device is done.
        """
        self.hook()
        passes: list[tuple[PendingMetrics, Tensor]] = []
        old_logprobs: list[OldLogprobs] = []
        for micro, before in zip(batch.micro, old or repeat(None), strict=bool(old)):
            # One call for each micro-batch: an engine on the same thread gets its turn in between.
            pending, logprobs_N, now = await self.policy.compute(self.micro, micro, before)
            passes.append((pending, logprobs_N))
            old_logprobs.append(now)
        queued()
        metrics, values = await self.policy.compute(self.settle, passes)
        return BatchPass(metrics=metrics, logprobs=values, old_logprobs=old_logprobs)

    async def divergences(self, batch: StepBatch) -> Sequence[Sequence[float]]:
        """``divergence`` of every micro-batch."""
        return [await self.policy.compute(self.divergence, micro) for micro in batch.micro]

    @trace.span("seconds/forward_backward")
    def divergence(self, micro: Micro) -> list[float]:
        """By how much each trained token's sampled logprob is above the reference's; 0 where none was recorded."""
        reference_N, sampled_N = self._reference(micro), micro.batch.behavior_logprobs_N
        assert reference_N is not None
        values: list[float] = torch.where(sampled_N == UNKNOWN_LOGPROB, 0.0, sampled_N - reference_N).tolist()
        return values

    async def every(self, verb: Verb, *arguments: Any) -> Any:
        """Have every rank update its weights, fold them or move its reference; the result of this one."""
        return await self.policy.compute(getattr(self, verb), *arguments)

    def hook(self) -> None:
        """Hand every gradient to the stepper as soon as backward has made it, so that none of model size piles up."""
        if not self._hooked:
            for parameter in self.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.stepper.accumulate)
            self._hooked = True

    @trace.span("seconds/forward_backward")
    def micro(self, micro: Micro, old: OldLogprobs | None) -> tuple[PendingMetrics, Tensor, OldLogprobs]:
        """Queue one micro-batch; asking the device for anything here would hold up all that follow."""
        ref_logprobs_N = self._reference(micro) if old is None and self.objective.reference is not None else None
        logprobs_N, entropy_N = self._distribution(micro, entropy=True)
        if old is None:
            old = OldLogprobs(recomputed_logprobs_N=logprobs_N.detach(), ref_logprobs_N=ref_logprobs_N)
        cost_N, metrics = self.objective(logprobs_N, micro.batch, old)
        loss = (cost_N * micro.weights_N).sum()
        loss.backward()
        self.reduce()
        assert entropy_N is not None
        of_step = {"loss": Pending(Sum, loss), "entropy": Pending(Mean, entropy_N.sum(), entropy_N.numel())}
        return {**metrics, **of_step}, logprobs_N.detach(), old

    def reduce(self) -> None:
        """Nothing: gradients are whole where there are no other ranks."""

    @trace.span("seconds/forward_backward")
    def settle(
        self, passes: Sequence[tuple[PendingMetrics, Tensor]]
    ) -> tuple[list[dict[str, Value]], list[list[float]]]:
        """All metrics of a pass, by one copy from the device."""
        return settle([pending for pending, _ in passes], [logprobs_N for _, logprobs_N in passes])

    @trace.span("seconds/optimizer")
    def apply(self, lr: float, max_grad_norm: float) -> Tensor:
        """Update the weights; the gradient's norm, which nothing has waited for."""
        return self.stepper.step(lr, max_grad_norm)

    @trace.span("seconds/optimizer")
    def norms(self, queued: Sequence[Tensor]) -> list[float]:
        """Numbers of the norms of a step's updates."""
        norms = [norm for (norm,) in fetch(queued)]
        if self.policy.device.type == "cpu":  # activations and gradients are gone, and of other sizes the next time
            machine.trim()
        return norms

    def move(self) -> None:
        """Have the reference follow the policy."""
        assert self.reference is not None
        self.reference.move()

    def _reference(self, micro: Micro) -> Tensor | None:
        """The reference's logprob of each trained token, by the same pass as the policy's."""
        if self.reference is None:
            return None
        with torch.no_grad(), self.reference.in_place():
            return self.logprobs(micro)

    def logprobs(self, micro: Micro) -> Tensor:
        """Logprob of each trained token, float32, as it was sampled: penalised, at its temperature, in its support."""
        return self._distribution(micro)[0]

    def _distribution(self, micro: Micro, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """What ``logprobs`` returns, and the entropy of the distribution each token was sampled from, nats."""
        part = self.part(micro)
        head, sampling = self.policy.head, self.sampling
        logprobs_M, entropy_M = token_logprobs(
            part.hidden(self.policy.hidden),
            head.weight,
            part.own(micro.targets_N),
            part.own(micro.temperature_N),
            bias=head.bias,
            end=self.policy.end,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            history=micro.history,
            entropy=entropy,
            tile=self.tile,
            compile=self.policy.compile,
        )
        return part.joined(logprobs_M), None if entropy_M is None else part.joined(entropy_M)

    def part(self, micro: Micro) -> WholeRow | ContextPart:
        """What of a micro-batch this rank computes."""
        return WholeRow(micro.plan, micro.tokens_T, micro.positions_T, micro.predict_N)
