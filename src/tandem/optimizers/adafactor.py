"""Adafactor (arXiv 1804.04235)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import bounded
from tandem.lazy import Parameter, Tensor, torch
from tandem.optimizers._precise import Precise, PreciseStepper, TrainedWeight, whole
from tandem.optimizers.base import Stepper

_TINY = 1e-30
"""Least mean of squares that is divided by the root of; gradients of a millionth of a millionth are above it."""


@dataclass(frozen=True, kw_only=True)
class Adafactor(Precise):
    """Adafactor without momentum: of squared gradients it keeps the means of rows and columns alone.

    The rate is relative: a tensor moves by lr times its root mean square, so the same step takes a rate about fifty
    times AdamW's. With ``relative_rate: false`` it is AdamW's, as in transformers with scale_parameter=False.
    """

    lr: float = bounded(5e-5, above=0)
    """Peak learning rate, relative to each tensor's root mean square."""
    relative_rate: bool = True
    """False: the rate is absolute, the root mean square of the largest update that clip_rms lets through."""
    beta2_decay: float = bounded(-0.8, least=-1, most=0)
    """At step t the squared gradient's running mean forgets a share of t to this power."""
    scale_floor: float = bounded(1e-3)
    """A tensor whose root mean square is smaller moves as if it were this."""
    clip_rms: float = bounded(1.0, above=0)
    """An update whose root mean square, before the rate, is larger is scaled down to it."""
    weight_decay: float = bounded(0.0)
    """Share of each weight that is subtracted per step, times the rate."""

    def inert(self) -> Mapping[str, str]:
        """The floor of a scale that is not looked at."""
        unread = {} if self.relative_rate else {"scale_floor": "relative_rate: false does not scale by a tensor's size"}
        return {**super().inert(), **unread}

    def bind(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Stepper:
        """Allocate means and what ``precision`` needs."""
        return _Factored(self, self.weights(whole(named_parameters)))

    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """The gradient and what ``precision`` keeps beside narrow weights; means of rows and columns are no weight."""
        return num_parameters * self.precise_bytes(parameter_bytes)


class _Factored(PreciseStepper):
    """Adafactor bound to parameters."""

    _options: Adafactor

    def fresh(self, weight: TrainedWeight) -> dict[str, Tensor]:
        """Means of rows and of columns; of a vector every square."""
        shape, device = weight.parameter.shape, weight.parameter.device
        state = {"step": torch.zeros(())}
        if len(shape) < 2:
            return {**state, "variance": torch.zeros(shape, device=device)}
        row, column = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return {**state, "row_var": torch.zeros(row, device=device), "col_var": torch.zeros(column, device=device)}

    def update(self, weights: Sequence[TrainedWeight], lr: float, clip: float) -> None:
        """One tensor at a time; its means need all of it."""
        for weight in weights:
            shape, state = weight.parameter.shape, self.states[weight]
            state["step"] += 1
            for value, grad, _ in weight.pieces(max(1, weight.parameter.numel()), clip=clip):
                self._advance(value.view(shape), grad.view(shape), state, weight.steps, lr)

    def _advance(self, value: Tensor, grad: Tensor, state: dict[str, Tensor], steps: int, lr: float) -> None:
        """Update a tensor and its means; the gradient becomes the update. No number is waited for."""
        options = self._options
        share = steps**options.beta2_decay
        size: float | Tensor = lr
        if options.relative_rate:
            size = _rms(value).clamp_(min=options.scale_floor) * min(lr, steps**-0.5)
        if grad.dim() > 1:
            row_var, col_var = state["row_var"], state["col_var"]
            row_var.lerp_(_mean_square(grad, -1), share)
            col_var.lerp_(_mean_square(grad, -2), share)
            # The estimate row · column / mean of rows is as large as the weight; the roots of its factors are not.
            rows = row_var / row_var.mean(-2, keepdim=True).clamp_(min=_TINY)
            grad.mul_(_inverse_root(rows)).mul_(_inverse_root(col_var))
        else:
            state["variance"].lerp_(grad.square(), share)
            grad.mul_(_inverse_root(state["variance"]))
        if options.weight_decay:
            value.mul_(1 - lr * options.weight_decay)
        value.addcmul_(grad, size / (_rms(grad) / options.clip_rms).clamp_(min=1.0), value=-1)


def _rms(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.div_(math.sqrt(max(1, values.numel())))


def _mean_square(grad: Tensor, dim: int) -> Tensor:
    """By the norm, since squares would be a tensor of the gradient's size."""
    norm: Tensor = torch.linalg.vector_norm(grad, dim=dim, keepdim=True)
    return norm.square_().div_(grad.shape[dim])


def _inverse_root(squares: Tensor) -> Tensor:
    return squares.clamp(min=_TINY).rsqrt_()
