"""Memory plan: what a run needs, line by line, before any weight is loaded."""

from __future__ import annotations

from tandem.trainer.memory_plan.plan import (
    MARGIN,
    TYPICAL_PROMPT,
    MemoryLine,
    MemoryPlan,
    Planner,
    context,
    planner,
    with_gradients,
)
from tandem.trainer.memory_plan.ranks import RankCounts

__all__ = [
    "MARGIN",
    "TYPICAL_PROMPT",
    "MemoryLine",
    "MemoryPlan",
    "Planner",
    "RankCounts",
    "context",
    "planner",
    "with_gradients",
]
