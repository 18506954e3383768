"""What a run needs in memory, line by line, before any weight is loaded."""

from __future__ import annotations

from tandem.trainer.memory_plan.engines import ENGINE
from tandem.trainer.memory_plan.fitting import Fitted, fit, settled
from tandem.trainer.memory_plan.lines import (
    DRIVER,
    GRADER,
    LIBRARIES,
    TYPICAL_PROMPT,
    Planner,
    context,
    planner,
)
from tandem.trainer.memory_plan.table import MemoryLine, MemoryPlan

__all__ = [
    "DRIVER",
    "ENGINE",
    "GRADER",
    "LIBRARIES",
    "TYPICAL_PROMPT",
    "Fitted",
    "MemoryLine",
    "MemoryPlan",
    "Planner",
    "context",
    "fit",
    "planner",
    "settled",
]
