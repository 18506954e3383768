"""An optimizer step: micro-batches to a gradient, and updates of the weights. The packer's weights divide its loss.

``Step`` says in which order all ranks compute. ``LocalWork`` is the work of one: its ``micro`` is forward, objective
and backward. ``Objective`` is the loss, weighed by corrections, plus the penalty of a reference.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any, Literal, Self

import torch
from torch import Tensor

from tandem import machine
from tandem.algorithms.corrections.base import Correction
from tandem.algorithms.losses.base import MOST_LOG_RATIO, Loss, MicroBatch, check_loss, check_shape
from tandem.algorithms.references.base import Reference, ReferenceWeights
from tandem.config import registry
from tandem.config.loading import RunConfig, loss_reference
from tandem.distributed.context_parallel import WholeRow
from tandem.metrics import Max, Mean, Share, Sum, Value, merge
from tandem.model import routing
from tandem.model.logprobs import token_logprobs
from tandem.model.policy import Policy
from tandem.model.routing import Routing
from tandem.observability import trace
from tandem.optimizers.base import Optimizer, Stepper
from tandem.pending import Pending, PendingMetrics, fetch, settle
from tandem.trainer.pack import Micro, Packer, StepBatch
from tandem.types import UNKNOWN_LOGPROB, Group, Sampling

Verb = Literal["apply", "fold", "move", "begin"]
"""What every rank of a step does in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogprobs:
    """Old and reference logprobs of a micro-batch, which stay the same over the updates of its step."""

    recomputed_logprobs_N: Tensor
    """The policy's, when the step began."""
    ref_logprobs_N: Tensor | None
    """The reference's, if there is one."""


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
        metrics, values, old_logprobs = await self.work.passed(batch, old, queued)
        logprobs: dict[str, list[float]] = {}
        for micro, of_micro in zip(batch.micro, values, strict=True):
            at = 0
            for rollout, num in micro.places:
                logprobs.setdefault(rollout, []).extend(of_micro[at : at + num])
                at += num
        return StepStats(
            metrics=merge([*metrics, _never_clipped(batch, metrics)]),
            logprobs={k: tuple(v) for k, v in logprobs.items()},
            old_logprobs=old_logprobs,
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
            begins = step == self.warm_steps  # the reference is the policy at the end of the warm start
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


BatchPass = tuple[Sequence[Mapping[str, Value]], Sequence[Sequence[float]], Sequence[OldLogprobs]]
"""What one pass over a batch measured: metrics of each micro-batch in the batch's order, logprobs of the trained tokens
of each, and of those that this process computed the old logprobs."""


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
    balance: float = 0.0
    """What the load-balancing loss of a mixture of experts counts."""
    _hooked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.balance and (experts := routing.of(self.policy.causal)) is not None:
            experts.balance()

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
            balance=config.router_aux_loss_coef,
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
        return metrics, values, old_logprobs

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
        owner = self.reference if verb in ("move", "begin") else self
        return await self.policy.compute(getattr(owner, verb), *arguments)

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
        logprobs_N, entropy_N = self._distribution(micro, entropy=not micro.supervised)
        if old is None:
            old = OldLogprobs(recomputed_logprobs_N=logprobs_N.detach(), ref_logprobs_N=ref_logprobs_N)
        metrics: dict[str, Value | Pending] = {**expert_load(routing.of(self.policy.causal))}
        loss_N = -logprobs_N
        if not micro.supervised:
            loss_N, of_objective = self.objective(logprobs_N, micro.batch, old)
            metrics |= of_objective
        loss = (loss_N * micro.weights_N).sum()
        if self.balance and (experts := routing.of(self.policy.causal)) is not None:
            aux_loss = experts.balance_loss(self.policy.causal)
            loss = loss + self.balance * micro.share * aux_loss
            metrics["moe/aux_loss"] = Pending(Sum, aux_loss.detach() * micro.share)
        loss.backward()
        self.reduce()
        metrics["loss"] = Pending(Sum, loss)
        if entropy_N is not None:
            metrics["entropy"] = Pending(Mean, entropy_N.sum(), entropy_N.numel())
        return metrics, logprobs_N.detach(), old

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

    def _reference(self, micro: Micro) -> Tensor | None:
        """The reference's logprob of each trained token, by the same pass as the policy's."""
        if self.reference is None:
            return None
        if micro.plan.experts_TLK is not None:  # the sampler's choice was the policy's; the reference makes its own
            micro = replace(micro, plan=replace(micro.plan, experts_TLK=None))
        with torch.no_grad(), self.reference.in_place():
            return self._distribution(micro)[0]

    def _distribution(self, micro: Micro, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Logprob of each trained token, and the entropy, in nats, of the distribution that it was sampled from.

        float32, as it was sampled: penalised, at its temperature, in its support.
        """
        part = self.part(micro)
        head, sampling = self.policy.head, Sampling() if micro.supervised else self.sampling
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

    def part(self, micro: Micro) -> WholeRow:
        """What of a micro-batch this rank computes."""
        return WholeRow(micro.plan, micro.tokens_T, micro.positions_T, micro.predict_N)


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
        """The loss of each token, float32 and differentiable, and its metrics."""
        micro = self.informed(batch, old)
        output = self.loss(logprobs_N, micro)
        check_loss(self.loss, output, logprobs_N)
        metrics: dict[str, Value | Pending] = {**output.metrics, **mismatch(logprobs_N.detach(), micro)}
        loss_N = output.loss_N
        if self.corrections:
            weights_N, of_corrections = self.weights(logprobs_N.detach(), micro)
            loss_N = loss_N * weights_N
            metrics |= of_corrections
        if self.reference is not None:
            penalty_N, kl_N = self.reference.divergence(logprobs_N, micro)
            loss_N = loss_N + self.reference.beta * penalty_N
            metrics["kl_reference"] = Pending(Mean, kl_N.sum(), kl_N.numel())
        return loss_N, metrics

    def informed(self, batch: MicroBatch, old: OldLogprobs) -> MicroBatch:
        """The micro-batch with old and reference logprobs; one that the sampler did not record is the policy's."""
        recorded_N = batch.behavior_logprobs_N
        return replace(
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
            kind = registry.kind_of("corrections", correction)
            weights_N = correction(logprobs_N, micro)
            check_shape(f"correction {kind}", weights_N, logprobs_N)
            metrics[f"correction/{kind}/masked"] = Pending(Mean, (weights_N == 0).sum(), n)
            whole_N = whole_N * weights_N
        total = whole_N.sum()
        metrics["correction/weight"] = Pending(Mean, total, n)
        metrics["correction/masked"] = Pending(Mean, (whole_N == 0).sum(), n)
        metrics["correction/ess"] = Pending(Share, total, whole_N.square().sum(), n)
        return whole_N, metrics


def expert_load(experts: Routing | None) -> PendingMetrics:
    """Metrics of the experts that a micro-batch was routed to, over all layers that have some.

    moe/load_max is the largest load of an expert in the mean one's, 1 where all are alike; moe/unused the share of
    experts without a token.
    """
    load_RE = None if experts is None else experts.load()
    if load_RE is None:
        return {}
    return {
        "moe/load_max": Pending(Max, load_RE.max() / load_RE.mean()),
        "moe/unused": Pending(Mean, (load_RE == 0).sum(), load_RE.numel()),
    }


def mismatch(logprobs_N: Tensor, micro: MicroBatch) -> PendingMetrics:
    """Metrics of the distance between the policy and the policy that sampled its tokens.

    kl_behavior estimates KL(behavior || policy) from the behaviour's own samples: the mean of r - 1 - log r, which is
    never negative (k3 of http://joschu.net/blog/kl-approx.html). ess is the effective sample size of the ratios as a
    share of the tokens: (sum r)^2 / (n sum r^2), 1 where all are alike. logprob/positive and /negative are the policy's
    mean logprobs of tokens with positive and with negative advantage: training should widen the gap.
    """
    n = logprobs_N.numel()
    if n == 0:
        return {}
    better_N, worse_N = micro.advantages_N > 0, micro.advantages_N < 0
    gap_N = logprobs_N - micro.behavior_logprobs_N
    held_N = gap_N.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    ratio_N = held_N.double().exp()
    return {
        "kl_behavior": Pending(Mean, (torch.expm1(held_N) - gap_N).double().sum(), n),
        "logprob_gap/max": Pending(Max, gap_N.abs().max()),
        "ess": Pending(Share, ratio_N.sum(), ratio_N.square().sum(), n),
        "logprob/positive": Pending(Mean, (logprobs_N * better_N).double().sum(), better_N.sum()),
        "logprob/negative": Pending(Mean, (logprobs_N * worse_N).double().sum(), worse_N.sum()),
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
