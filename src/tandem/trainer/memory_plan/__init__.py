"""Memory plan: what a run needs, line by line, before any weight is loaded."""

from __future__ import annotations

from tandem.trainer.memory_plan.fitting import Fitted, chooses_gradients, fit, settled, with_gradients
from tandem.trainer.memory_plan.plan import (
    MARGIN,
    TYPICAL_PROMPT,
    MemoryLine,
    MemoryPlan,
    Planner,
    context,
    planner,
)
from tandem.trainer.memory_plan.ranks import RankCounts

__all__ = [
    "MARGIN",
    "TYPICAL_PROMPT",
    "Fitted",
    "MemoryLine",
    "MemoryPlan",
    "Planner",
    "RankCounts",
    "chooses_gradients",
    "context",
    "fit",
    "planner",
    "settled",
    "with_gradients",
]
