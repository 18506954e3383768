"""A certificate, and a recipe's policy under it: the run's own step, on weights that go where the certificate says."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tandem.config import loading as recipes
from tandem.config.loading import RunConfig, loss_reference
from tandem.model import packing
from tandem.model.policy import Compute, Policy, load_config
from tandem.testing.oracle import PlainModel, part
from tandem.trainer.pack import StepBatch
from tandem.trainer.step import LocalWork, Step
from tandem.trainer.world import changing, prepared

Gradient = Mapping[str, Tensor]
"""By parameter name."""

MOVES = 0.1
"""Weights move by this share of their own deviation, from the model as loaded to the step, and at each update."""
LEAST = 0.02
"""How far weights that are all alike move."""


@dataclass(slots=True)
class Recorder:
    """Stands where the optimizer does: keeps the gradients of each update, and always moves the weights alike.

    As an optimizer's, its writes reach what a merged adapter computes with only when the step folds them.
    """

    parameters: Mapping[str, Parameter]
    """By name."""
    move: Callable[[int], None]
    """Sets the weights to those after so many updates."""
    updates: list[dict[str, Tensor]] = field(default_factory=list)
    """The gradient of each update so far."""
    _sums: dict[int, Tensor] = field(default_factory=dict)

    def accumulate(self, parameter: Parameter) -> None:
        """Add in float32, as optimizers do."""
        assert parameter.grad is not None
        self._sums[id(parameter)] = self._sums.get(id(parameter), 0) + parameter.grad.float()
        parameter.grad = None

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Keep what was added up, 0 of a weight that no token reaches; the weights go to where the next one begins."""
        sums = {name: self._sums.pop(id(p), torch.zeros_like(p)) for name, p in self.parameters.items()}
        self.updates.append(sums)
        self.move(len(self.updates))
        return torch.tensor(norm([sums]), dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """It has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It has no state."""


_ODD = {"attention_dropout": 0.2, "initializer_range": 0.03}
"""What a run may not apply; and weights wide enough that the next-token distribution is not uniform."""
_TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **_ODD}
"""Sizes with which most architectures are computed in milliseconds."""


def certified(config: RunConfig) -> tuple[nn.Module, PlainModel]:
    """A tiny random model like the recipe's in float32 on the CPU, prepared for training; and in float64, as it was.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    depth = max([2, *(layer + 1 for layer in config.trainable.layers or ())])
    small = packing.small(load_config(config.model), depth)
    tiny = _resized(small, _TINY)
    try:
        with torch.no_grad():
            packing.causal_class(tiny).from_config(tiny).eval()(torch.zeros(1, 2, dtype=torch.int64))
    except Exception:  # as of an architecture that lists values by layer
        tiny = _resized(small, _ODD)
    torch.manual_seed(config.seed)
    options = packing.attention(tiny, config.packing)
    model = packing.causal_class(tiny).from_config(tiny, dtype=torch.float32, **options)
    exact = PlainModel(model, part(recipes.as_json(config)["trainable"]))
    return prepared(config, model), exact


def _resized(config: Any, sizes: Mapping[str, float]) -> Any:
    """The same with these sizes, where it has them."""
    resized = copy.deepcopy(config)
    text = resized.get_text_config()
    for name, size in sizes.items():
        if hasattr(text, name):
            setattr(text, name, size)
    return resized


class CertifiedPolicy:
    """A policy under a certificate: a tiny model like the recipe's."""

    def __init__(self, config: RunConfig):
        self.config = config
        model, self.exact = certified(config)
        self.policy = Policy(model, None, name="certified", compute=Compute(torch.get_num_threads()))
        self._parameters = dict(config.trainable.parameters(model))
        self._loaded = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._moves = {name: MOVES * _deviation(loaded) for name, loaded in self._loaded.items()}
        self._changing = changing(config, self.policy)
        self._recorder = Recorder(self._parameters, lambda update: self._write(self.placed(update)))
        self.work = LocalWork.of(config, self.policy, self._recorder, None)
        self._step = Step(
            work=self.work, optimizer=config.optimizer, steps=1, updates_per_batch=config.updates_per_batch
        )

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
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(value)

    def _place(self, update: int) -> None:
        """Set the weights to those that are ``placed`` then, as they are published."""
        self._write(self.placed(update))
        self.work.fold()

    def _begin(self) -> None:
        """Be as a run is when its first step begins: moved away from what was loaded, which a reference holds."""
        self._place(-1)
        reference = loss_reference(self.config)
        self.work.reference = None if reference is None else reference.hold(self._changing)
        self._place(0)

    def gradients(self, batch: StepBatch) -> list[Gradient]:
        """Of every update on the batch, in the first step."""
        return self.walk([(1, batch)])

    def walk(self, steps: Sequence[tuple[int, StepBatch]]) -> list[Gradient]:
        """Of every update of some steps, each given by its number in the run and its batch."""
        self._begin()
        self._recorder.updates = []

        async def whole() -> None:
            for number, batch in steps:
                self.work.fold()  # as it is published
                stats = await self._step.forward_backward(batch)
                await self._step.apply(number, batch, stats)

        asyncio.run(whole())
        return list(self._recorder.updates)

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
    if [each.keys() for each in actual] != [each.keys() for each in expected]:
        return math.inf
    off = [{n: f[n].double() - e[n].double() for n in e} for f, e in zip(actual, expected, strict=True)]
    whole = norm(expected)
    return norm(off) / whole if whole else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLine:
    """One check."""

    name: str
    """Of what."""
    state: Literal["pass", "fail", "skipped"]
    """How it went."""
    figure: float | None = None
    """The largest distance found."""
    bound: float | None = None
    """The largest that passes."""
    note: str = ""
    """What the figure is the distance from, as a share of its norm (where the bound is 0, so many differ), and more."""


def judged(name: str, figures: Sequence[float], bound: float, *notes: str) -> CertificateLine:
    """A check that passes if no distance is above the bound; one that is not a number fails."""
    return CertificateLine(
        name=name,
        state="pass" if all(figure <= bound for figure in figures) else "fail",
        figure=max(figures, key=lambda figure: math.inf if math.isnan(figure) else figure),
        bound=bound,
        note="; ".join(filter(None, notes)),
    )


def skipped(name: str, why: str) -> CertificateLine:
    """A check that cannot be made."""
    return CertificateLine(name=name, state="skipped", note=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Result of all comparisons for a recipe."""

    model: str
    """What the gradient is of."""
    lines: tuple[CertificateLine, ...]
    """Every check."""
    seconds: float
    """What it took."""
