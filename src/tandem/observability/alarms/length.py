"""Answer length: it collapses, explodes, or answers are cut by the token limit, and the main reward does not rise."""

from __future__ import annotations

from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.history import START, MetricsHistory, Window, percent, short

COLLAPSE = 0.25
"""Part of an earlier length that is a collapse."""
EXPLOSION = 2.0
"""Multiple of an earlier length that is an explosion where it comes near the limit: reasoning may grow."""
NEAR = 0.5
"""Part of sampling.max_tokens that is near."""
SHORT = 12.0
"""Tokens: what was shorter than this cannot collapse."""
CUT = 0.3
"""Share of answers cut by a length limit that is too many."""
FALLS = 0.05
"""Fall of that share since an earlier window that shows that it mends itself."""


class LengthAlarm(Alarm):
    """Answers become very short, very long, or do not end. Not reported while the main reward rises."""

    name: ClassVar[Name] = "length"
    metrics: ClassVar[tuple[str, ...]] = ("length", "rollouts/truncated")

    def look(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        if now is None:
            return None
        then = [window for window in history.earlier() if not history.rises(window)]
        return first(
            (
                first(self._collapsed(history, now, window) for window in then),
                first(self._exploded(history, now, window) for window in then),
                self._cut(history, now, then),
            )
        )

    def _collapsed(self, history: MetricsHistory, now: Window, then: Window) -> Finding | None:
        length, before = now.median("length"), then.median("length")
        if length is None or before is None or before < SHORT or length > COLLAPSE * before:
            return None
        return Finding(
            seen=f"answers have {short(length)} tokens ({now}), {short(before)} at {then}, {history.goal(then)}",
            means="The policy found that saying less earns as much: a reward that does not need the reasoning, a bonus "
            "that a few tokens earn, or a learning rate that broke it.",
            change=f"Read some answers (tandem show --report). {_bonuses(history)}{history.recipe.less('optimizer.lr')}"
            "; a reward that asks for reasoning before the answer; a reference (reference: start) holds the policy "
            "near what it was.",
        )

    def _exploded(self, history: MetricsHistory, now: Window, then: Window) -> Finding | None:
        length, before = now.median("length"), then.median("length")
        if length is None or not before or length - before < SHORT or length < EXPLOSION * before:
            return None
        most = history.recipe.get("sampling.max_tokens")
        if isinstance(most, int) and length < NEAR * most:
            return None
        return Finding(
            seen=f"answers have {short(length)} tokens ({now}), {short(before)} at {then}, {history.goal(then)}",
            means="Answers that go on do not lose by it: length is rewarded by a weakness of the reward or of the "
            "loss's normalisation, or the policy forgets how to end, and repeats itself.",
            change="Read some answers (tandem show --report). truncated: penalise, or rewards.overlong=0.5, which "
            "lowers the reward near sampling.max_tokens, or rewards.repetition=0.5; "
            f"{history.recipe.less('optimizer.lr')}.",
        )

    def _cut(self, history: MetricsHistory, now: Window, then: list[Window]) -> Finding | None:
        """Too many answers are cut, and not fewer than before."""
        cut = now.median("rollouts/truncated")
        if cut is None or cut <= CUT or cut + (now.mean("accuracy") or 0.0) > 1.0 + FALLS:
            return None  # of the last, many that are cut are right: what counts stands before
        for window in then:
            if len(window.rows) <= START:  # too few to tell whether it falls
                continue
            before = window.median("rollouts/truncated")
            if before is not None and before - cut < FALLS:
                return Finding(
                    seen=f"{percent(cut)} of answers are cut by a length limit ({now}; {percent(before)} at {window}; "
                    f"at most {percent(CUT)} is usual), {history.goal(window)}",
                    means="The answer stands at the end: what is cut earns nothing whatever it says, so the policy is "
                    "punished for thinking, or taught that ending does not matter.",
                    change=f"{history.recipe.more('sampling.max_tokens')}, with context large enough; or an "
                    "instruction to be brief; truncated: mask leaves such answers out of the loss.",
                )
        return None


def _bonuses(history: MetricsHistory) -> str:
    """Advice on the lesser rewards, where there are some."""
    bonuses = history.recipe.bonuses
    return f"Take {' and '.join(bonuses)} out of rewards, or make them pay only beside a right answer. " * bool(bonuses)
