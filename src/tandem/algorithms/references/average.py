"""Moving-average reference (TR-DPO)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from tandem.algorithms.references.base import Reference, ReferenceWeights
from tandem.errors import bounded
from tandem.lazy import Parameter


@dataclass(frozen=True, kw_only=True)
class Average(Reference):
    """TR-DPO's soft update (arXiv 2404.09656): every so many steps, reference = (1 - mixup) reference + mixup policy.

    It starts from the model as loaded. The sum is computed in float32 and stored in the weights' type: with bfloat16 a
    mixup below 0.01 changes few weights.
    """

    saved: ClassVar[bool] = True

    mixup: float = bounded(0.6, above=0, most=1)
    """Share of the policy in each update; 1 replaces the reference with it."""
    every: int = bounded(512, least=1)
    """Optimizer steps between updates."""

    def hold(self, live: Iterable[tuple[str, Parameter]]) -> ReferenceWeights:
        """Saved with every checkpoint."""
        return _Moving(self, live)


class _Moving(ReferenceWeights):
    """Average bound to weights."""

    def __init__(self, options: Average, live: Iterable[tuple[str, Parameter]]):
        super().__init__(live)
        self._options, self._moved = options, True

    def due(self, step: int) -> bool:
        return step % self._options.every == 0

    def move(self) -> None:
        for name, parameter in self._live.items():
            averaged, now = self._own[name].to(parameter.device), parameter.detach().float()
            mixed = averaged.float().mul_(1 - self._options.mixup).add_(now, alpha=self._options.mixup)
            self._own[name] = mixed.to(averaged.dtype)
