"""Gradient norm: peaks that come again, or a level that rises and stays."""

from __future__ import annotations

import statistics
from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.history import MetricsHistory, short

PEAK = 8.0
"""Multiple of the window's median that is a peak ..."""
SCATTER = 10.0
"""... if it is also as many median absolute deviations above it."""
PEAKS, WITHIN = 3, 20
"""As many peaks within as many steps are reported."""
LEVEL = 10.0
"""Multiple of an earlier level that is a rise."""


class GradNormAlarm(Alarm):
    """The norm of the gradient before clipping jumps or rises."""

    name: ClassVar[Name] = "grad_norm"
    metrics: ClassVar[tuple[str, ...]] = ("grad_norm",)

    def look(self, history: MetricsHistory) -> Finding | None:
        return first((self._peaks(history), self._level(history)))

    def _peaks(self, history: MetricsHistory) -> Finding | None:
        window = history.now(WITHIN) or history.now(WITHIN // 2)
        norms = [norm for norm in window.values("grad_norm") if norm > 0] if window else []
        if window is None or len(norms) < WITHIN // 2:
            return None
        usual = statistics.median(norms)
        scatter = statistics.median(abs(norm - usual) for norm in norms)
        peaks = [norm for norm in norms if norm > max(PEAK * usual, usual + SCATTER * scatter)]
        if len(peaks) < PEAKS:
            return None
        highest = f"up to {short(max(peaks))} where {short(usual)} is the median"
        return self._finding(history, f"grad_norm had {len(peaks)} peaks in {window}, {highest}")

    def _level(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        level = None if now is None else now.median("grad_norm")
        for then in history.earlier():
            before = then.median("grad_norm")
            if now and level and before and level > LEVEL * before and level > self._clip(history):
                return self._finding(history, f"grad_norm is {short(level)} ({now}), {short(before)} at {then}")
        return None

    def _clip(self, history: MetricsHistory) -> float:
        """What the norm is clipped to; a rise below it is no danger."""
        clip = history.recipe.get("optimizer.max_grad_norm")
        return float(clip) if isinstance(clip, (int, float)) else 1.0

    def _finding(self, history: MetricsHistory, seen: str) -> Finding:
        return Finding(
            seen=seen,
            means="Steps go in the direction of a few extreme samples (clipping bounds the length of a step, not where "
            "it goes): the learning rate is too large, a group has a reward far outside the others, or ratios are far "
            "from 1.",
            change=f"{history.recipe.less('optimizer.lr')}; {history.recipe.less('optimizer.max_grad_norm', 2)}; "
            f"{history.recipe.more('groups_per_step')}; rewards within a bounded range.",
        )
