"""Grading: it takes the larger part of a step, or fails often."""

from __future__ import annotations

from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.history import GROUPS, NOW, MetricsHistory, Window, percent, short

SHARE = 0.5
"""Part of a step that grading takes while the trainer waits, from which on it is the larger part."""
FAILED = 0.1
"""Share of rollouts that graders may lose."""
FAILURES = ("timeout", "raised", "bad_value", "crashed", "away")
"""Why a rollout has no reward, as metrics count it under ``grading/failed_``."""


class GradingAlarm(Alarm):
    """Graders hold the run up, or lose what was sampled."""

    name: ClassVar[Name] = "grading"
    metrics: ClassVar[tuple[str, ...]] = ("grading/busy_seconds", "seconds/step", "rollouts/failed")

    def look(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        return None if now is None else first((self._fails(history, now), self._slow(history, now)))

    def _slow(self, history: MetricsHistory, now: Window) -> Finding | None:
        step, wait, busy = (now.median(name) for name in ("seconds/step", "seconds/wait", "grading/busy_seconds"))
        if not step or wait is None or busy is None or min(busy, wait) < SHARE * step:
            return None
        workers = history.recipe.more("grading.workers")
        overlap = "" if history.recipe.get("max_lag") else "max_lag=1, so that grading overlaps with training; "
        return Finding(
            seen=f"graders are at work for {short(busy)} s of a step of {short(step)} s ({now}), and the trainer waits "
            f"for {short(wait)} s of it",
            means="Engine and trainer stand still for the graders: a reward that is slow (a judge, code that is run, "
            "symbolic mathematics) or too few processes for it.",
            change=f"{workers}; {overlap}a faster reward, or a smaller grading.timeout_seconds where a few answers "
            "take all of it.",
        )

    def _fails(self, history: MetricsHistory, now: Window) -> Finding | None:
        counts = {why: now.total(f"grading/failed_{why}") for why in FAILURES}
        rollouts = sampled(history, now)
        lost = sum(counts.values())
        if not rollouts or lost < FAILED * rollouts or lost < NOW:
            return None
        most = max(counts, key=lambda why: counts[why])
        reasons = ", ".join(f"{count:g} {why}" for why, count in counts.items() if count)
        return Finding(
            seen=f"graders gave no reward for {percent(lost / rollouts)} of rollouts ({now}: {reasons} of "
            f"{rollouts:g})",
            means="What a grader loses is not trained on, and not at random: usually the long or odd answers, which "
            "bends what is learned.",
            change="logs/graders.log says why. "
            + ("A larger grading.timeout_seconds, or a faster reward." if most == "timeout" else "Mend the reward: it "
               "should return 0 for what it cannot read, and raise for what is wrong with itself alone."),
        )  # fmt: skip


def sampled(history: MetricsHistory, window: Window) -> float:
    """Rollouts of the groups that a window's steps measured."""
    size = history.recipe.get("group_size")
    return window.total(GROUPS) * (size if isinstance(size, int) else 1)
