"""Pace of ranks: how long each computes for what it was dealt, compared with the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tandem.metrics import Max, Mean, Sum, Value

SLOWDOWN = "ranks/slowdown"
"""Metric of the slowest rank's pace over the median rank's; of each rank with its number after a slash."""


def paces(seconds: Sequence[float], costs: Sequence[float]) -> dict[str, Value]:
    """Metrics of ranks' paces: their seconds, and those for the same work over the median rank's.

    Args:
        seconds: that each rank computed, waits for others left out.
        costs: of the micro-batches of each; a rank without any has no pace.
    """
    metrics: dict[str, Value] = {f"ranks/compute_seconds/{rank}": Sum(each) for rank, each in enumerate(seconds)}
    pace = {rank: each / costs[rank] for rank, each in enumerate(seconds) if costs[rank]}
    if not pace or not (middle := statistics.median(pace.values())):
        return metrics
    slowdowns = {rank: each / middle for rank, each in pace.items()}
    metrics |= {f"{SLOWDOWN}/{rank}": Mean(each, 1) for rank, each in slowdowns.items()}
    return {**metrics, SLOWDOWN: Max(max(slowdowns.values()))}
