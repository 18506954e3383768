"""Learning rates, clipping and the shipped optimizers once more, in float64, as their papers have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.tools.certify.formula import Options

BLOCK = 256
"""Numbers of an 8-bit moment that share a scale."""
FLOATS = 4096
"""Smaller weights have moments in float32, whatever others have."""
ZERO = 1e-300
"""Stands where a zero is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update that an optimizer made."""

    step: int
    """Of the run, from 1; several updates may be one step's."""
    gradients: Mapping[str, Tensor]
    """Summed over micro-batches, by parameter name."""
    before: Mapping[str, Tensor]
    """The weights."""
    after: Mapping[str, Tensor]
    """The weights."""
    norm: float
    """Of the gradients, as the optimizer told it."""

    @property
    def moved(self) -> dict[str, Tensor]:
        """How far every weight went, float64."""
        return {name: self.after[name].double() - self.before[name].double() for name in self.gradients}


def rate(options: Options, step: int, total: int) -> float:
    """Learning rate of a step of so many: a linear rise, then constant or down along a line or half a cosine."""
    peak, rise = options["lr"], options["warmup_steps"]
    if step <= rise:
        return float(peak * step / rise)
    done = min(1.0, (step - rise) / max(1, total - rise))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[options["schedule"]]
    low = options["min_lr_ratio"]
    return float(peak * (low + (1 - low) * left))


def size(gradients: Mapping[str, Tensor]) -> float:
    """Global L2 norm."""
    return math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def moves(optimizer: tuple[str, Options], updates: Iterable[Update], total: int) -> Iterator[dict[str, Tensor]]:
    """How far each update moves every weight, float64, given the weights before it.

    Args:
        optimizer: kind and options.
        updates: what is made, in order; states are carried from one to the next.
        total: steps of the run.
    """
    kind, options = optimizer
    states: dict[str, State] = {}
    for count, update in enumerate(updates, 1):
        norm, most = size(update.gradients), options["max_grad_norm"]
        clip = most / norm if 0 < most < norm else 1.0
        lr = rate(options, update.step, total)
        found = {}
        for name, gradient in update.gradients.items():
            state, before = states.setdefault(name, {}), update.before[name].double()
            found[name] = RULES[kind](state, gradient.double() * clip, before, lr, count, options)
        yield found


State = dict[str, Tensor]


def _adamw(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    means = []
    for name, power, beta in (("mean", 1, options["beta1"]), ("square", 2, options["beta2"])):
        state[name] = beta * state.get(name, torch.zeros_like(gradient)) + (1 - beta) * gradient**power
        means.append(state[name] / (1 - beta**count))
    direction = means[0] / (means[1].sqrt() + options["eps"])
    move: Tensor = -lr * (direction + options["weight_decay"] * weight)
    return move


def _adamw8bit(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    move = _adamw(state, gradient, weight, lr, count, options)
    if weight.numel() >= FLOATS:
        state["mean"], state["square"] = _rounded(state["mean"], True), _rounded(state["square"], False)
    return move


def _rounded(moment: Tensor, signed: bool) -> Tensor:
    """To the nearest of a byte's 256 shares of the largest number of its block; a square never to 0."""
    book = _book(signed)
    flat = torch.cat([moment.flatten(), torch.zeros(-moment.numel() % BLOCK, dtype=moment.dtype)]).view(-1, BLOCK)
    scales = flat.abs().amax(1, keepdim=True)
    shares = flat / scales.clamp(min=ZERO)
    above = torch.searchsorted(book, shares.contiguous()).clamp(1, 255)
    nearer = (book[above] - shares).abs() < (shares - book[above - 1]).abs()
    at = torch.where(nearer, above, above - 1).clamp(min=0 if signed else 1)
    return (book[at] * scales).flatten()[: moment.numel()].view_as(moment)


def _book(signed: bool) -> Tensor:
    """Dynamic tree quantisation: 0, 1 and the middles of evenly cut decades, each cut in twice as many as the next."""
    values = [0.0, 1.0]
    for decade in range(7):
        cuts = 2**decade * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (2 * i + 1) / (2 * cuts)) * 10.0 ** (decade - 6) for i in range(cuts)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


def _adafactor(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    squares, share = gradient.square(), count ** options["beta2_decay"]
    kept = {"all": squares} if gradient.dim() < 2 else {"rows": squares.mean(-1), "columns": squares.mean(-2)}
    for name, value in kept.items():
        state[name] = (1 - share) * state.get(name, torch.zeros_like(value)) + share * value
    if gradient.dim() < 2:
        estimate = state["all"]
    else:
        rows, columns = state["rows"], state["columns"]
        estimate = rows[..., None] * columns[..., None, :] / rows.mean(-1)[..., None, None].clamp(min=ZERO)
    direction = torch.where(estimate > 0, gradient / estimate.clamp(min=ZERO).sqrt(), 0.0)
    direction = direction / max(1.0, _rms(direction) / options["clip_rms"])
    scale = max(options["scale_floor"], _rms(weight)) * min(lr, count**-0.5)
    move: Tensor = -scale * direction - lr * options["weight_decay"] * weight
    return move


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean()))


RULES: Mapping[str, Callable[[State, Tensor, Tensor, float, int, Options], Tensor]] = {
    "adamw": _adamw,
    "adamw_cpu": _adamw,
    "adamw8bit": _adamw8bit,
    "adafactor": _adafactor,
}
"""How far a weight moves, given what is kept of it, its clipped gradient, itself, the rate, the count of its updates
from 1 and options."""
RELATIVE = ("adafactor",)
"""Those whose rate is a share of the weights."""
