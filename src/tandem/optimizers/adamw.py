"""AdamW (arXiv 1711.05101) in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.optimizers._adam import Adam, FloatMoments
from tandem.optimizers._precise import FLOAT, Precise
from tandem.optimizers.base import ParameterPart, PartStepper


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam, Precise):
    """AdamW in float32. Narrower weights lose no update, however small: see ``precision``."""

    def bind_parts(self, parts: Sequence[ParameterPart]) -> PartStepper:
        """Allocate moments, and masters of narrow weights."""
        return FloatMoments(self, self.weights(parts))

    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """Two moments, the gradient and what ``precision`` keeps beside weights narrower than float32."""
        return num_parameters * (2 * FLOAT + self.precise_bytes(parameter_bytes))
