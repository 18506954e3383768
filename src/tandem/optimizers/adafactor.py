"""Adafactor (arXiv 1804.04235)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim._adafactor import adafactor

from tandem.optimizers._slots import FLOAT, Precise, Slot, Slots
from tandem.optimizers.base import Stepper

# torch's own, 1e-7, is larger than squared gradients are here: rows and columns would no longer count.
_EPS1 = 1e-15


@dataclass(frozen=True, kw_only=True)
class Adafactor(Precise):
    """Adafactor without momentum: of squared gradients it keeps the means of rows and columns alone.

    The rate is relative: a tensor moves by lr times its root mean square, so the same step takes a rate about fifty
    times AdamW's.
    """

    lr: float = 5e-5
    """Peak learning rate, relative to each tensor's root mean square."""
    beta2_decay: float = -0.8
    """At step t the squared gradient's running mean forgets a share of t to this power."""
    scale_floor: float = 1e-3
    """A tensor whose root mean square is smaller moves as if it were this."""
    clip_rms: float = 1.0
    """An update whose root mean square, before the rate, is larger is scaled down to it."""
    weight_decay: float = 0.0
    """Share of each weight that is subtracted per step, times the rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.beta2_decay <= 0:
            raise ValueError("beta2_decay must be between -1 and 0")
        if not 0 < self.clip_rms < math.inf:
            raise ValueError("clip_rms must be above 0 and finite")
        for name in ("scale_floor", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite")

    def bind(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Stepper:
        """Allocate means and what ``precision`` needs."""
        return _Factored(self, [Slot(name, parameter, self.precision) for name, parameter in named_parameters])

    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """The gradient and what ``precision`` keeps beside narrow weights; means of rows and columns are no weight."""
        return num_parameters * (FLOAT + self.narrow_bytes(parameter_bytes))


class _Factored(Slots):
    """Adafactor bound to parameters."""

    def __init__(self, options: Adafactor, slots: Sequence[Slot]):
        self._options = options
        super().__init__(slots)

    def fresh(self, slot: Slot) -> dict[str, Tensor]:
        """Means of rows and of columns; of a vector every square."""
        shape, device = slot.parameter.shape, slot.parameter.device
        state = {"step": torch.zeros(())}
        if len(shape) < 2:
            return {**state, "variance": torch.zeros(shape, device=device)}
        row, column = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return {**state, "row_var": torch.zeros(row, device=device), "col_var": torch.zeros(column, device=device)}

    def update(self, slots: Sequence[Slot], lr: float) -> None:
        """One tensor at a time; its means need all of it."""
        for slot in slots:
            state = self.states[slot]
            means: list[Any] = [[state.get(key)] for key in ("row_var", "col_var", "variance")]  # those it has
            shape = slot.parameter.shape
            for value, _ in slot.pieces(max(1, slot.parameter.numel())):
                adafactor(
                    [value.view(shape)],
                    [slot.gradient],
                    means[0],
                    means[1],
                    means[2],
                    [state["step"]],
                    foreach=False,
                    d=self._options.clip_rms,
                    lr=lr,
                    beta2_decay=self._options.beta2_decay,
                    weight_decay=self._options.weight_decay,
                    eps1=_EPS1,
                    eps2=self._options.scale_floor,
                    maximize=False,
                )
