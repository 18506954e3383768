"""What a certificate puts around a rank's optimizer: it keeps what goes in and out, as states that ranks gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.optimizers.base import ParameterPart, PartStepper, UpdatesParts

GRADIENT, BEFORE, AFTER = "gradient", "before", "after"
"""What is kept of each update: the sum of what ranks computed, and the weights."""

Placed = Callable[[int], Mapping[str, Tensor]]
"""Whole weights by name, after so many updates."""


@dataclass(frozen=True, slots=True)
class Recording:
    """An optimizer of which every rank's part is recorded.

    Example:
        >>> from tandem.optimizers.adamw import AdamW
        >>> isinstance(Recording(AdamW()), UpdatesParts)
        True
    """

    optimizer: UpdatesParts
    """Whose parts these are."""
    placed: Placed | None = None
    """Where weights go whatever the optimizer did; None: they are the optimizer's, and are kept."""

    def bind_parts(self, parts: Sequence[ParameterPart]) -> PartStepper:
        """Record what it does with these."""
        return RecordedParts(parts, self.optimizer.bind_parts(parts), self.placed)


class RecordedParts:
    """A rank's part of an optimizer, every update of which is kept.

    Args:
        parts: what this rank updates.
        inner: updates them.
        placed: as of ``Recording``.
    """

    def __init__(self, parts: Sequence[ParameterPart], inner: PartStepper, placed: Placed | None):
        self._parts, self._inner, self._placed = list(parts), inner, placed
        self._sums: dict[Parameter, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._updates = 0

    def add(self, parameter: Parameter, grad: Tensor) -> None:
        """Note it, and hand it on."""
        self._sums[parameter] = self._sums[parameter] + grad if parameter in self._sums else grad.clone()
        self._inner.add(parameter, grad)

    def gradients(self) -> Mapping[Parameter, Tensor]:
        """As the optimizer has them."""
        return self._inner.gradients()

    def forget(self, parameter: Parameter) -> None:
        """Hand on: no rank has one."""
        self._sums.pop(parameter, None)
        self._inner.forget(parameter)

    @torch.no_grad()
    def update_by(self, norm: Tensor, lr: float, max_grad_norm: float) -> None:
        """Let it update, and keep what it did."""
        self._keep(GRADIENT, lambda part: self._sums.get(part.parameter, torch.zeros_like(part.parameter)))
        if self._placed is None:
            self._keep(BEFORE, lambda part: part.parameter.clone())
        self._inner.update_by(norm, lr, max_grad_norm)
        if self._placed is None:
            self._keep(AFTER, lambda part: part.parameter.clone())
        self._sums = {}
        self._updates += 1
        if self._placed is not None:
            self._put(self._placed(self._updates))

    def _keep(self, kind: str, of: Callable[[ParameterPart], Tensor]) -> None:
        for part in self._parts:
            self._kept[f"{part.label}/{kind}-{self._updates}"] = of(part).detach()

    def _put(self, whole: Mapping[str, Tensor]) -> None:
        for part in self._parts:
            mine = whole[part.name].view(-1)[part.start :][: part.parameter.numel()]
            part.parameter.copy_(mine.view(part.parameter.shape))

    def zero_grad(self) -> None:
        """Hand on."""
        self._sums = {}
        self._inner.zero_grad()

    def accumulate(self, parameter: Parameter) -> None:
        """Gradients of parts come by ``add``."""
        raise NotImplementedError("a part has no gradient of its own")

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Parts are updated by ``update_by``."""
        raise NotImplementedError("the norm is that of all ranks")

    def state_dict(self) -> dict[str, Any]:
        """What was kept, which is how it gets to the lead."""
        return dict(self._kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing goes on from a certificate."""
        raise NotImplementedError("records are only read")


def of_updates(states: Mapping[str, Tensor], kind: str) -> list[dict[str, Tensor]]:
    """What was kept of each update, by parameter name, of states that were gathered."""
    updates: dict[int, dict[str, Tensor]] = {}
    for key, value in states.items():
        name, _, ending = key.rpartition("/")
        its_kind, _, number = ending.partition("-")
        if its_kind == kind:
            updates.setdefault(int(number), {})[name] = value
    return [updates[number] for number in sorted(updates)]
