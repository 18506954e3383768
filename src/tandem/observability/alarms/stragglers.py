"""Stragglers: one rank computes more slowly than the others, which wait for it."""

from __future__ import annotations

import statistics
from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name
from tandem.observability.alarms.history import MetricsHistory, percent, short

STEPS = 20
"""Steps in a row in each of which a rank must be behind."""
BEHIND = 1.1
"""Times the median rank's seconds for the same work from which on a rank is behind."""
OF_RANK = "ranks/slowdown/"
"""Before the number of a rank, in the metric that has this of it."""


class StragglersAlarm(Alarm):
    """One rank holds the others up."""

    name: ClassVar[Name] = "stragglers"
    metrics: ClassVar[tuple[str, ...]] = ("ranks/slowdown", "ranks/imbalance", "seconds/forward_backward")
    confirm: ClassVar[int] = 1  # what it looks at are enough steps in a row

    def look(self, history: MetricsHistory) -> Finding | None:
        if (history.newest("ranks/slowdown") or 0.0) < BEHIND or (now := history.now(STEPS)) is None:
            return None
        values = {name: now.values(name) for name in now.rows[-1][1] if name.startswith(OF_RANK)}
        behind = {
            name.removeprefix(OF_RANK): statistics.median(each)
            for name, each in values.items()
            if len(each) == STEPS and min(each) > BEHIND
        }
        if not behind:
            return None
        slowest = max(behind, key=lambda rank: behind[rank])
        others = f"; rank {', '.join(rank for rank in behind if rank != slowest)} too" if len(behind) > 1 else ""
        return Finding(
            seen=f"rank {slowest} takes {short(behind[slowest])} times the median rank's time for the same work, and "
            f"was more than {percent(BEHIND - 1)} behind in each of {now}{others}",
            means="Every rank waits for the slowest one in each round: a GPU that is hot, throttled or shared with "
            "another process, a slower host, or processors that something else takes.",
            change="tandem why on the run's folder has the rank's host and process. There, nvidia-smi -q -d "
            "PERFORMANCE,TEMPERATURE says whether its GPU is throttled, and nvidia-smi what else is on it. End what "
            "does not belong there, or go on without that GPU or host, with fewer ranks.",
        )
