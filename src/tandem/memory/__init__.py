"""What a run needs in memory, line by line, before any weight is loaded."""

from __future__ import annotations

from tandem.memory.engines import ENGINE
from tandem.memory.lines import (
    DRIVER,
    GRADER,
    LIBRARIES,
    TYPICAL_PROMPT,
    activation_bytes,
    checkpoint_bytes,
    context,
    count,
    plan,
)
from tandem.memory.table import Line, MemoryPlan

__all__ = [
    "DRIVER",
    "ENGINE",
    "GRADER",
    "LIBRARIES",
    "TYPICAL_PROMPT",
    "Line",
    "MemoryPlan",
    "activation_bytes",
    "checkpoint_bytes",
    "context",
    "count",
    "plan",
]
