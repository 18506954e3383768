"""Zero-variance groups: all answers to a task earn the same, so nearly all sampling is for nothing."""

from __future__ import annotations

from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.entropy import collapsed
from tandem.observability.alarms.history import (
    EARLIER,
    GROUPS,
    SOLVED,
    ZERO_VARIANCE,
    MetricsHistory,
    Window,
    percent,
    short,
)

MOST = 0.85
"""Share of groups without variance that is too many, whatever it was before."""
RISE = 0.3
"""Rise of the share since an earlier window ..."""
HIGH = 0.75
"""... that is a collapse if it ends above this."""
LEAST = 16
"""Groups that a share is of, at least."""


class ZeroVarianceAlarm(Alarm):
    """Groups have no variance, and not since the tasks are solved."""

    name: ClassVar[Name] = "zero_variance"
    metrics: ClassVar[tuple[str, ...]] = ("groups/dropped_zero_variance",)

    def look(self, history: MetricsHistory) -> Finding | None:
        now = history.now(EARLIER)
        if now is None:
            return None
        share, accuracy = zero_variance(now), now.mean("accuracy")
        if share is None or (accuracy is not None and accuracy >= SOLVED):
            return None
        return first(
            (self._most(history, now, share), *(self._rose(history, now, share, w) for w in history.earlier()))
        )

    def _most(self, history: MetricsHistory, now: Window, share: float) -> Finding | None:
        if share <= MOST:
            return None
        return self._finding(
            history, now, f"{percent(share)} of groups have zero variance ({now}; at most half is usual)"
        )

    def _rose(self, history: MetricsHistory, now: Window, share: float, then: Window) -> Finding | None:
        before = zero_variance(then)
        if before is None or share < HIGH or share - before < RISE or history.rises(then):
            return None
        seen = (
            f"{percent(share)} of groups have zero variance ({now}), {percent(before)} at {then}, {history.goal(then)}"
        )
        return self._finding(history, now, seen)

    def _finding(self, history: MetricsHistory, now: Window, seen: str) -> Finding:
        entropy, first = now.median("entropy"), history.start.median("entropy")
        if entropy is not None and first and collapsed(entropy, first):
            return Finding(
                seen=f"{seen}; entropy is {short(entropy)} nats per token, {short(first)} at {history.start}",
                means="Answers have become all alike: the policy is certain of them without being right. Usually the "
                "updates were too large; the tasks are not to blame.",
                change=f"{history.recipe.less('optimizer.lr')}; {history.recipe.warmer()}what is lost does not come "
                "back: begin again, or from the weights of a checkpoint before it.",
            )
        accuracy = now.mean("accuracy") or 0.0
        hard = accuracy < 0.5
        return Finding(
            seen=f"{seen}; accuracy is {percent(accuracy)}, reward/std {short(now.mean('reward/std') or 0.0)}",
            means=("Hardly anybody solves these tasks" if hard else "Nearly everybody solves these tasks")
            + ", or answers have become all alike: all siblings earn the same, no advantage is left, and sampling is "
            "for nothing.",
            change=("Easier tasks or a stronger model" if hard else "Harder tasks")
            + f"; curriculum: solve_rate; {history.recipe.more('group_size')}; {history.recipe.warmer()}"
            "where answers became alike, see the alarms entropy and length.",
        )


def zero_variance(window: Window) -> float | None:
    """Share of the groups in a window, of all environments, whose rewards are all equal; None for too few groups."""
    groups = window.total(GROUPS)
    return window.total(ZERO_VARIANCE) / groups if groups >= LEAST else None
