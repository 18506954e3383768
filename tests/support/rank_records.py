"""An optimizer that keeps the gradients of ranks' parts, as states, and moves weights alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.optimizers.base import ParameterPart, PartStepper, UpdatesParts

Placed = Callable[[int], Mapping[str, Tensor]]
"""Whole weights by name, after so many updates."""


@dataclass(frozen=True, slots=True)
class Recording:
    """An optimizer of which every rank's part is recorded; weights go where ``placed`` says."""

    optimizer: UpdatesParts
    placed: Placed

    def bind_parts(self, parts: Sequence[ParameterPart]) -> PartStepper:
        return RecordedParts(parts, self.optimizer.bind_parts(parts), self.placed)


class RecordedParts:
    def __init__(self, parts: Sequence[ParameterPart], inner: PartStepper, placed: Placed):
        self._parts, self._inner, self._placed = list(parts), inner, placed
        self._sums: dict[Parameter, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._updates = 0

    def add(self, parameter: Parameter, grad: Tensor) -> None:
        self._sums[parameter] = self._sums[parameter] + grad if parameter in self._sums else grad.clone()
        self._inner.add(parameter, grad)

    def gradients(self) -> Mapping[Parameter, Tensor]:
        return self._inner.gradients()

    def forget(self, parameter: Parameter) -> None:
        self._sums.pop(parameter, None)
        self._inner.forget(parameter)

    @torch.no_grad()
    def update_by(self, norm: Tensor, lr: float, max_grad_norm: float) -> None:
        for part in self._parts:
            grad = self._sums.get(part.parameter, torch.zeros_like(part.parameter))
            self._kept[f"{part.label}/gradient-{self._updates}"] = grad.detach()
        self._inner.update_by(norm, lr, max_grad_norm)
        self._sums = {}
        self._updates += 1
        whole = self._placed(self._updates)
        for part in self._parts:
            mine = whole[part.name].view(-1)[part.start :][: part.parameter.numel()]
            part.parameter.copy_(mine.view(part.parameter.shape))

    def zero_grad(self) -> None:
        self._sums = {}
        self._inner.zero_grad()

    def accumulate(self, parameter: Parameter) -> None:
        raise NotImplementedError("gradients of parts come by add")

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        raise NotImplementedError("parts are updated by update_by: the norm is that of all ranks")

    def state_dict(self) -> dict[str, Any]:
        return dict(self._kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("records are only read")


def of_updates(states: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The gradient of each update by parameter name, of whole states."""
    updates: dict[int, dict[str, Tensor]] = {}
    for key, gradient in states.items():
        name, _, ending = key.rpartition("/")
        kind, _, number = ending.partition("-")
        if kind == "gradient":
            updates.setdefault(int(number), {})[name] = gradient
    return [updates[number] for number in sorted(updates)]
