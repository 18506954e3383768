"""A recipe's own optimizer, handed known gradients by the trainer's own step, against the formulas."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.config import loading as recipes
from tandem.metrics import flatten
from tandem.optimizers.base import Optimizer
from tandem.testing.oracle import OPTIMIZERS, ExactOptimizer, Options, part, rate
from tandem.tools.certify.policy import CertificateLine, CertifiedPolicy, Gradient, distance, judged, norm, skipped
from tandem.trainer.pack import StepBatch
from tandem.trainer.step import BatchPass, LocalWork, OldLogprobs, Step, Verb

RATE, TWO_STEPS, SMALL_STEP = "learning rates", "two optimizer steps", "an optimizer step on gradients as small as eps"
NORMS, NARROW, BIAS = "gradient norms as told", "bfloat16 weights", "bfloat16 rounding"

RATES = 1000
"""Steps of which the learning rate is looked at, at most."""
RATE_EXACT = 1e-12
"""Largest distance of a learning rate, which is a float64 on both sides."""
LEAST_RATE = 1e-3
"""Learning rate on float32 weights, at least: of smaller updates they keep few digits."""
ROUNDING = 2.0**-23
"""What float32 rounds off a weight that is updated, as a share of it."""
CODES = 1e-2
"""Largest distance of an optimizer whose states are bytes: a number between two codes may be rounded to either."""
CLIPPED, WHOLE = 4.0, 0.25
"""Norm of the gradient in the first step and in the second, as shares of the norm that is clipped to."""
MICROS, HALVES = (0.5, 0.2, 0.3), (0.5, 0.5)
"""Shares of a gradient that its micro-batches have; of bfloat16 ones, whose sum is to be exact."""
NUMBERS = 1 << 18
"""Numbers that are looked at, at most, whole weights of them."""

UPDATES = 16
"""How many updates bfloat16 weights have."""
STEP = 2.0**-10
"""How far each moves them, as a share of them: a quarter or an eighth of their last bit."""
LOST = 0.1
"""Largest share of the way that may be missing: it ends within half of a last bit, which weights began on."""
BIASED = 0.05
"""Largest mean of what rounding may leave, in last bits: weights that are cut off are half of one too small."""
WALK, SIGMAS = 2.0, 4.0
"""Deviation of what as many roundings at random leave, in last bits, and so many deviations of its mean are chance."""


@dataclass(kw_only=True)
class KnownGradients(LocalWork):
    """Work of one rank, whose passes hand the optimizer known gradients instead of computing them."""

    named: Mapping[str, Parameter]
    """What the optimizer updates."""
    updates: Iterator[Sequence[Gradient]]
    """The gradients of every update's micro-batches."""

    def __post_init__(self) -> None:
        self.weights = [self._copied()]
        """Before the first update, and after each."""

    def _copied(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}

    async def passed(self, batch: StepBatch, known: Sequence[OldLogprobs], queued: Callable[[], None]) -> BatchPass:
        """The next update's gradient, micro-batch by micro-batch."""
        for micro in next(self.updates):
            for name, parameter in self.named.items():
                parameter.grad = micro[name].to(parameter.dtype, copy=True)
                self.stepper.accumulate(parameter)
        return (), (), ()

    async def every(self, verb: Verb, *arguments: Any) -> Any:
        """As of any step; where updates took the weights is kept."""
        result = await super().every(verb, *arguments)
        if verb == "apply":
            self.weights.append(self._copied())
        return result


@dataclass(frozen=True, slots=True)
class Applied:
    """What an optimizer made of known gradients, update by update."""

    gradients: list[tuple[int, Gradient]]
    """Step of the run, from 1, and the sum over micro-batches."""
    weights: list[dict[str, Tensor]]
    """Before the first, and after each."""
    reported: list[float]
    """Gradient norm of each step's first update, as the step reports it."""

    def line(self, name: str, known: tuple[str, Options], total: int, bound: float) -> CertificateLine:
        """How the weights moved against the formula, given the gradients and the weights before."""
        exact = ExactOptimizer(*known, total)
        before = self.weights[:-1]
        expected = [exact.update(*each, here) for each, here in zip(self.gradients, before, strict=True)]
        moved = [
            {name: there[name].double() - here[name].double() for name in here}
            for here, there in zip(before, self.weights[1:], strict=True)
        ]
        rounding = ROUNDING * norm(before) / (norm(expected) or 1.0)
        allowed = max(bound, CODES if known[0] == "adamw8bit" else 0.0) + rounding
        return judged(name, [distance(moved, expected)], allowed, "float64 formula", f"{len(moved)} updates")


def applied(
    live: CertifiedPolicy,
    optimizer: Optimizer,
    begin: Mapping[str, Tensor],
    gradients: Sequence[Gradient],
    total: int,
    shares: Sequence[float] = MICROS,
) -> Applied:
    """Have an optimizer make one step of each gradient, with as many updates as the recipe's.

    Args:
        live: whose compute thread it is done on.
        optimizer: the recipe's, or one like it.
        begin: the weights, by name and of the type that they are trained in.
        gradients: of each step.
        total: steps of the run.
        shares: of its micro-batches.
    """
    named = {name: Parameter(weight.clone()) for name, weight in begin.items()}
    every = live.config.updates_per_batch
    numbered = [(number, each) for number, each in enumerate(gradients, 1) for _ in range(every)]
    micros = ([{name: g * share for name, g in each.items()} for share in shares] for _, each in numbered)
    stepper = optimizer.bind(list(named.items()))
    work = KnownGradients.of(live.config, live.policy, stepper, None, named=named, updates=micros)
    step = Step(work=work, optimizer=optimizer, steps=total, updates_per_batch=every)
    empty = StepBatch(micro=(), groups=(), advantages={}, num_loss_tokens=0)
    reported: list[float] = []

    async def run() -> None:
        for number in range(1, len(gradients) + 1):
            stats = await step.forward_backward(empty)
            reported.append(flatten(await step.apply(number, empty, stats))["grad_norm"])

    asyncio.run(run())
    return Applied(numbered, work.weights, reported)


def lines(live: CertifiedPolicy, gradient: Gradient, bound: float) -> Iterator[CertificateLine]:
    """Learning rates, and what the recipe's optimizer makes of a gradient, at most ``bound`` off."""
    own, total = live.config.optimizer, live.config.steps
    kind, options = part(recipes.as_json(live.config)["optimizer"])
    if kind not in OPTIMIZERS:
        yield skipped(TWO_STEPS, f"no formula is known here for optimizer {kind}")
        return
    some = range(1, total + 1, max(1, total // RATES))
    off = [abs(own.rate(step, total) - rate(options, step, total)) for step in some]
    yield judged(RATE, [max(off) / (own.lr or 1.0)], RATE_EXACT, "formula", f"{total:,} steps")
    begin = _first(live.placed(0))
    gradient, total = {name: gradient[name] for name in begin}, max(total, 2)
    float32: dict[str, Any] = {"gradients": "float32"} if hasattr(own, "gradients") else {}
    visible = dataclasses.replace(own, lr=max(own.lr, LEAST_RATE), **float32)
    known = (kind, {**options, "lr": visible.lr})
    most = own.max_grad_norm or 1.0
    two = applied(live, visible, begin, [_sized(gradient, share * most) for share in (CLIPPED, WHOLE)], total)
    yield two.line(TWO_STEPS, known, total, bound)
    if eps := options.get("eps"):
        small = _sized(gradient, eps * math.sqrt(_numbers(begin)))
        yield applied(live, visible, begin, [small], total).line(SMALL_STEP, known, total, bound)
    norms = [norm([each]) for _, each in two.gradients[:: live.config.updates_per_batch]]
    off = [abs(reported / (whole or 1.0) - 1) for reported, whole in zip(two.reported, norms, strict=True)]
    yield judged(NORMS, off, bound, "float64 formula")
    if live.config.dtype == "bfloat16":
        yield from _narrow(live, (kind, options), begin, gradient)


def _narrow(
    live: CertifiedPolicy, known: tuple[str, Options], begin: Mapping[str, Tensor], gradient: Gradient
) -> Iterator[CertificateLine]:
    """How far bfloat16 weights go by updates smaller than their last bit, and what rounding leaves of it."""
    begin = {name: weight.bfloat16() for name, weight in begin.items()}
    grads = {name: 2 * (gradient[name] / 2).bfloat16() for name in begin}
    relative = known[0] == "adafactor" and known[1]["relative_rate"]
    lr = STEP * (1.0 if relative else norm([begin]) / math.sqrt(_numbers(begin)))
    steady = dataclasses.replace(live.config.optimizer, lr=lr, warmup_steps=0, schedule="constant")
    made = applied(live, steady, begin, [grads] * UPDATES, UPDATES, HALVES)
    exact = ExactOptimizer(known[0], {**known[1], "lr": lr, "warmup_steps": 0, "schedule": "constant"}, UPDATES)
    there = {name: weight.double() for name, weight in begin.items()}
    for step, each in made.gradients:
        moved = exact.update(step, each, there)
        there = {name: weight + moved[name] for name, weight in there.items()}
    start_N, exact_N, ended_N = (
        torch.cat([each[name].double().flatten() for name in begin]) for each in (begin, there, made.weights[-1])
    )
    way_N = exact_N - start_N
    share = float(((ended_N - start_N) * way_N).sum()) / (float(way_N.square().sum()) or 1.0)
    note = f"{len(made.gradients)} updates of part of their last bit"
    yield judged(NARROW, [abs(share - 1)], LOST, "float64 formula", note)
    largest_N = torch.maximum(exact_N.abs(), ended_N.abs())
    off_N = torch.ldexp(ended_N - exact_N, 8 - torch.frexp(largest_N).exponent)  # a bfloat16 has 8 bits
    means = [abs(float(off_N.mean())), abs(float((off_N * exact_N.sign()).mean()))]
    chance = SIGMAS * WALK * math.sqrt(live.config.updates_per_batch / len(off_N))
    yield judged(BIAS, means, BIASED + chance, "0", "mean error in last bits, downwards or towards 0")


def _sized(gradient: Gradient, size: float) -> Gradient:
    """The same with another norm."""
    whole = norm([gradient]) or 1.0
    return {name: each * (size / whole) for name, each in gradient.items()}


def _numbers(weights: Mapping[str, Tensor]) -> int:
    return sum(weight.numel() for weight in weights.values())


def _first(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first of them that are not too many, the first in any case."""
    some: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if some and _numbers(some) + weight.numel() > NUMBERS:
            break
        some[name] = weight
    return some
