"""Two steps of a run by its own optimizer, every gradient that it is handed and what it does to the weights noted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.metrics import flatten
from tandem.model.policy import Compute, Policy
from tandem.optimizers.base import Optimizer, Stepper
from tandem.tools.certify import optimizers
from tandem.tools.certify.formula import Options
from tandem.tools.certify.gradients import Setup, distance, norm
from tandem.tools.certify.line import Line, judged
from tandem.tools.certify.optimizers import Update
from tandem.trainer.pack import StepBatch
from tandem.trainer.step import Step

NAME = "two optimizer steps"
NORMS = "gradient norms as told"

ROUNDING = 2.0**-23
"""What float32 rounds off a weight that is updated, as a share of it."""
CODES = 1e-2
"""Largest distance of an optimizer whose states are bytes: a number between two codes may be rounded to either."""
LEAST_RATE = 1e-3
"""Learning rate of the two steps, at least: of smaller updates float32 weights keep few digits."""
CLIPPED, WHOLE = 4.0, 0.25
"""Norm of the gradient in the first step and in the second, as shares of the norm that is clipped to."""


@dataclass(slots=True)
class Witness:
    """Stands before an optimizer and notes what goes in and out; it changes nothing."""

    real: Stepper
    """The optimizer bound to the parameters."""
    parameters: Mapping[str, Parameter]
    """Those, by name."""
    step_number: int = 0
    """Of the run, from 1."""
    updates: list[Update] = field(default_factory=list)
    """What it did so far."""
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def accumulate(self, parameter: Parameter) -> None:
        """Add up in float32, in the order that they come, and hand on."""
        assert parameter.grad is not None
        (name,) = (name for name, other in self.parameters.items() if other is parameter)
        grad = parameter.grad.detach().float()
        self._sums[name] = self._sums[name] + grad if name in self._sums else grad.clone()
        self.real.accumulate(parameter)

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Let it update, and compare before with after."""
        before = self._weights()
        norm = self.real.step(lr, max_grad_norm)
        self.updates.append(
            Update(step=self.step_number, gradients=self._sums, before=before, after=self._weights(), norm=float(norm))
        )
        self._sums = {}
        return norm

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def zero_grad(self) -> None:
        """Hand on."""
        self._sums = {}
        self.real.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.real.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the optimizer."""
        self.real.load_state_dict(state)


def updates(
    setup: Setup, optimizer: Optimizer, steps: Sequence[StepBatch], *, total: int, begin: Mapping[str, Tensor]
) -> tuple[list[Update], list[float]]:
    """Every update of the first steps, and the norms that the steps told of their first ones.

    Args:
        setup: the model as it was loaded; it stays as it is.
        optimizer: the recipe's.
        steps: what each is trained on.
        total: steps of the run.
        begin: what is trained as the first step begins, by name.
    """
    model = copy.deepcopy(setup.model)
    parameters = dict(setup.trainable.parameters(model))
    fold: Callable[[], None] = lambda: setup.trainable.fold(model)  # noqa: E731 - a step takes it
    policy = Policy(model, None, name="certified", compute=Compute(torch.get_num_threads()))
    reference = setup.objective.reference
    with contextlib.closing(policy):
        fold()
        held = None if reference is None else reference.hold([(n, model.get_parameter(n)) for n in setup.changing])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(begin[name])
        witness = Witness(optimizer.bind(list(parameters.items())), parameters)
        step = Step(
            policy=policy,
            objective=setup.objective,
            optimizer=optimizer,
            stepper=witness,
            sampling=setup.sampling,
            steps=total,
            updates_per_batch=setup.updates,
            held=held,
            fold=fold,
        )
        told: list[float] = []

        async def run() -> None:
            for number, batch in enumerate(steps, 1):
                fold()  # as it is published
                witness.step_number = number
                stats = await step.forward_backward(batch)
                told.append(flatten(await step.apply(number, batch, stats))["grad_norm"])

        asyncio.run(run())
    return witness.updates, told


def times(batch: StepBatch, factor: float) -> StepBatch:
    """The same step with every token's loss times a factor, and so its gradient."""
    micro = (dataclasses.replace(micro, weights_N=micro.weights_N * factor) for micro in batch.micro)
    return dataclasses.replace(batch, micro=tuple(micro))


def visible(optimizer: Optimizer) -> Optimizer:
    """The same at a rate whose updates float32 weights show, and for such weights."""
    float32: dict[str, Any] = {"gradients": "float32"} if hasattr(optimizer, "gradients") else {}
    return dataclasses.replace(optimizer, lr=max(optimizer.lr, LEAST_RATE), **float32)


def two(batch: StepBatch, optimizer: Optimizer, size: float) -> list[StepBatch]:
    """Two steps on a batch whose gradient has this norm, the first clipped and the second not."""
    most = optimizer.max_grad_norm or 1.0
    return [times(batch, share * most / (size or 1.0)) for share in (CLIPPED, WHOLE)]


def lines(
    setup: Setup,
    optimizer: Optimizer,
    known: tuple[str, Options],
    batch: StepBatch,
    size: float,
    *,
    total: int,
    begin: Mapping[str, Tensor],
    bound: float,
) -> Iterator[Line]:
    """Two steps on a batch, the first clipped and the second not, against the formula.

    Args:
        setup: as of ``updates``.
        optimizer: as of ``updates``.
        known: its kind and options, as plain data.
        batch: what both steps are trained on.
        size: the norm of its gradient.
        total: as of ``updates``.
        begin: as of ``updates``.
        bound: largest distance, rounding of the weights aside.
    """
    kind, total = known[0], max(total, 2)
    optimizer, steps = visible(optimizer), two(batch, optimizer, size)
    made, told = updates(setup, optimizer, steps, total=total, begin=begin)
    expected = list(optimizers.moves((kind, {**known[1], "lr": optimizer.lr}), made, total))
    moved = [one.moved for one in made]
    rounding = ROUNDING * norm([one.before for one in made]) / (norm(expected) or 1.0)
    yield judged(
        NAME,
        [distance(moved, expected)],
        max(bound, CODES if kind == "adamw8bit" else 0.0) + rounding,
        "float64 formula",
        f"{len(made)} updates by {len(batch.micro)} micro-batches",
    )
    norms = [optimizers.size(one.gradients) for one in made]
    pairs = [*zip((one.norm for one in made), norms, strict=True), *zip(told, norms[:: setup.updates], strict=True)]
    yield judged(NORMS, [max(abs(one - other) / (other or 1.0) for one, other in pairs)], bound, "float64 formula")
