"""The gradient that the trainer's own step computes for every update on a batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tandem.config.loading import RunConfig
from tandem.model import layers
from tandem.model.compilation import Compile
from tandem.model.layers import Checkpointing
from tandem.model.policy import Compute, Policy
from tandem.optimizers.adamw import AdamW
from tandem.trainable.base import Trainable
from tandem.trainer.live import objective
from tandem.trainer.objective import Objective
from tandem.trainer.pack import Micro, StepBatch
from tandem.trainer.step import Step
from tandem.trainer.work import LocalWork
from tandem.types import Sampling

Gradient = Mapping[str, Tensor]
"""By parameter name."""

MOVES = 0.1
"""Weights move by this share of their own deviation, from the model as loaded to the step, and at each update."""
LEAST = 0.02
"""How far weights that are all alike move."""


@dataclass(slots=True, kw_only=True)
class Setup:
    """Inputs of a process that computes a gradient."""

    model: nn.Module
    """Prepared for training, float32, as it was loaded."""
    trainable: Trainable
    """What is trained."""
    changing: tuple[str, ...]
    """Names of the weights that training changes, as a reference holds them."""
    objective: Objective
    """Per token."""
    sampling: Sampling
    """Its support limits."""
    updates: int
    """On the batch."""
    moves: float = MOVES
    """See ``MOVES``."""
    tile: int | None = None
    """Most logits held at once; None: as fits."""


MOVES_REAL = 0.01
"""The same share of a trained model's weights: it must stay what it is."""


def setup_of(config: RunConfig, model: nn.Module, *, real: bool) -> Setup:
    """The setup of a recipe and its model, prepared for training; ``real``: it is the recipe's own."""
    return Setup(
        model=model,
        trainable=config.trainable,
        changing=tuple(meta.name for meta in config.trainable.source(model).manifest()),
        objective=objective(config),
        sampling=config.sampling,
        updates=config.updates_per_batch,
        moves=MOVES_REAL if real else MOVES,
    )


@dataclass(slots=True)
class Recorder:
    """Stands where the optimizer does: keeps the gradients of each update, and always moves the weights alike.

    As an optimizer's, its writes reach what a merged adapter computes with only when the step folds them.
    """

    named: Mapping[int, str]
    """Parameter names by identity."""
    move: Callable[[int], None]
    """Sets the weights to those after so many updates."""
    updates: list[dict[str, Tensor]] = field(default_factory=list)
    """The gradient of each update so far."""
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def accumulate(self, parameter: Parameter) -> None:
        """Add in float32, as optimizers do."""
        assert parameter.grad is not None
        name = self.named[id(parameter)]
        self._sums[name] += parameter.grad.float()
        parameter.grad = None

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Keep what was added up; the weights go where the next update is looked at."""
        sums = self._sums
        self.updates.append(sums)
        self._sums = {name: torch.zeros_like(gradient) for name, gradient in sums.items()}
        self.move(len(self.updates))
        return torch.tensor(norm([sums]), dtype=torch.float64)

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Forget everything, in order to look at a step anew; a weight that no token reaches has a gradient of 0."""
        self.updates = []
        self._sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def zero_grad(self) -> None:
        """Nothing unfinished is kept."""

    def state_dict(self) -> dict[str, Any]:
        """It has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It has no state."""


class CertifiedPolicy:
    """A policy under a certificate."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self._parameters = dict(setup.trainable.parameters(setup.model))
        self._loaded = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._moves = {name: setup.moves * _deviation(loaded) for name, loaded in self._loaded.items()}
        self.policy = Policy(setup.model, None, name="certified", compute=Compute(torch.get_num_threads()))
        self.recorder = Recorder({id(p): name for name, p in self._parameters.items()}, self._move)
        self.work = LocalWork(
            policy=self.policy,
            objective=setup.objective,
            stepper=self.recorder,
            sampling=setup.sampling,
            fold=self._fold,
        )
        self._step = Step(work=self.work, optimizer=AdamW(), steps=1)

    def _move(self, update: int) -> None:
        self.write(self.placed(update))

    def _fold(self) -> None:
        self.setup.trainable.fold(self.setup.model)

    def placed(self, update: int) -> dict[str, Tensor]:
        """What is trained, of the model as loaded (-1), of the first step's beginning (0), after an update (1) ..."""
        noise = torch.Generator()
        weights = {}
        for i, (name, loaded) in enumerate(self._loaded.items()):
            noise.manual_seed(i)  # so that each state goes on where the one before it was
            weights[name] = loaded.clone()
            for _ in range(update + 1):
                weights[name].add_(torch.randn(loaded.shape, generator=noise), alpha=self._moves[name])
        return weights

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set what is trained."""
        for name, value in values.items():
            self._parameters[name].copy_(value)

    def place(self, update: int) -> None:
        """Set the weights to those that are ``placed`` then, as they are published."""
        self.write(self.placed(update))
        self._fold()

    def gradients(self, batch: StepBatch) -> list[Gradient]:
        """Of every update on the batch, in the first step."""
        return self.walk([(1, batch)])

    def walk(self, steps: Sequence[tuple[int, StepBatch]]) -> list[Gradient]:
        """Of every update of some steps, each given by its number in the run and its batch."""
        step, setup = self._step, self.setup
        step.updates_per_batch = setup.updates
        self.begin()
        self.recorder.start(self._loaded)

        async def whole() -> None:
            for number, batch in steps:
                self._fold()  # as it is published
                stats = await step.forward_backward(batch)
                await step.apply(number, batch, stats)

        asyncio.run(whole())
        return list(self.recorder.updates)

    def begin(self) -> None:
        """Be as a run is when its first step begins: moved away from what was loaded, which a reference holds."""
        setup, work = self.setup, self.work
        self.place(-1)
        reference = setup.objective.reference
        work.held = None if reference is None else reference.hold(self.changing())
        work.objective, work.sampling, work.tile = setup.objective, setup.sampling, setup.tile
        self.place(0)

    def tune(self, *, compile: Compile, checkpointing: Checkpointing = "none") -> None:
        """Have the layers compiled, or computed again in the backward pass, from now on.

        Raises:
            ConfigError: it is not known which of the model's modules are its layers.
        """
        layers.tune(self.setup.model, compile=compile, checkpointing=checkpointing)

    @torch.no_grad()
    def scored(self, batch: StepBatch) -> list[tuple[Micro, Tensor, Tensor | None]]:
        """Each micro-batch, and the logprobs that policy and reference give its tokens as the first step begins."""
        self.place(-1)
        reference = self.setup.objective.reference
        held = None if reference is None else reference.hold(self.changing())
        self.place(0)
        self.work.tile = self.setup.tile
        scores = []
        for micro in batch.micro:
            before_N = None
            if held is not None:
                with held.in_place():
                    before_N = self.work.logprobs(micro)
            scores.append((micro, self.work.logprobs(micro), before_N))
        return scores

    def changing(self) -> list[tuple[str, Parameter]]:
        """The weights that a reference holds."""
        return [(name, self.setup.model.get_parameter(name)) for name in self.setup.changing]

    def close(self) -> None:
        """End its thread."""
        self.policy.close()


def _deviation(loaded: Tensor) -> float:
    """Of a weight's numbers; of those that are all alike, one that moves them by ``LEAST``."""
    return (loaded.std(correction=0).item() if loaded.numel() > 1 else 0.0) or LEAST / MOVES


def norm(updates: Sequence[Gradient]) -> float:
    """L2 norm over all gradients, summed in float64."""
    return math.sqrt(math.fsum(float(g.double().square().sum()) for each in updates for g in each.values()))


def distance(actual: Sequence[Gradient], expected: Sequence[Gradient]) -> float:
    """Norm of the difference over the norm of what is expected; infinite where the weights are not the same."""
    if len(actual) != len(expected) or any(f.keys() != e.keys() for f, e in zip(actual, expected, strict=True)):
        return math.inf
    off = [{n: f[n].double() - e[n].double() for n in e} for f, e in zip(actual, expected, strict=True)]
    whole = norm(expected)
    return norm(off) / whole if whole else math.inf


def differing(actual: Sequence[Gradient], expected: Sequence[Gradient]) -> str:
    """A weight that has a gradient in only one of them; empty if there is none."""
    if len(actual) != len(expected):
        return f"{len(actual)} updates instead of {len(expected)}"
    names = {name for one, other in zip(actual, expected, strict=True) for name in one.keys() ^ other.keys()}
    return f"not in both: {min(names)}" if names else ""
