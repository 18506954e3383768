"""AdamW with moments of one byte (arXiv 2110.02861)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tandem.optimizers._adam import Adam
from tandem.optimizers._precise import FLOAT, Precise
from tandem.optimizers.base import BLOCK, ParameterPart, PartStepper


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(Adam, Precise):
    """AdamW whose two moments take a byte each, scaled by blocks of 256; computed in float32.

    Torch's own operations on any device, compiled on a CUDA device that can; the same bits after a resume.
    """

    elementwise_bytes: ClassVar[int] = 6
    """Two moments of four bytes instead of one."""

    def bind_parts(self, parts: Sequence[ParameterPart]) -> PartStepper:
        """Allocate codes, scales and what ``precision`` needs."""
        from tandem.optimizers._byte_moments import ByteMoments  # which needs torch

        return ByteMoments(self, self.weights(parts))

    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """Two codes, two scales a block, the gradient and what ``precision`` keeps beside narrow weights."""
        scales = 2 * FLOAT * math.ceil(num_parameters / BLOCK)
        return num_parameters * (2 + self.precise_bytes(parameter_bytes)) + scales
