"""Entropy: it collapses, so that answers are all alike and nothing is explored; or explodes into noise."""

from __future__ import annotations

from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.history import MetricsHistory, Window, short

COLLAPSE = 0.1
"""Part of an earlier entropy that is a collapse, wherever it ends."""
LOW = 0.05
"""Nats below which a fall to a quarter is one too."""
EXPLOSION = 2.0
"""Multiple of an earlier entropy that is an explosion ..."""
MORE = 0.7
"""... if it is at least as many nats more: about twice as many tokens to choose from."""


def collapsed(now: float, before: float) -> bool:
    """True where the policy became certain of its tokens. Both in nats per token."""
    return before > 0 and (now <= COLLAPSE * before or (now < LOW and now <= 0.25 * before))


def exploded(now: float, before: float) -> bool:
    """True where the policy's tokens became random. Both in nats per token."""
    return now >= EXPLOSION * before and now - before >= MORE


class EntropyAlarm(Alarm):
    """The policy becomes certain, or random. Not reported while the main reward rises."""

    name: ClassVar[Name] = "entropy"
    metrics: ClassVar[tuple[str, ...]] = ("entropy",)

    def look(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        if now is None:
            return None
        then = [window for window in history.earlier() if not history.rises(window)]
        return first(self._compared(history, now, window) for window in then)

    def _compared(self, history: MetricsHistory, now: Window, then: Window) -> Finding | None:
        entropy, before = now.median("entropy"), then.median("entropy")
        if entropy is None or not before:
            return None
        seen = f"entropy is {short(entropy)} nats per token ({now}), {short(before)} at {then}, {history.goal(then)}"
        if collapsed(entropy, before):
            return Finding(
                seen=seen,
                means="The policy is certain of its answers without being right: siblings become alike, groups lose "
                "their variance, and nothing new is tried. Usually the steps are too large, or one easy pattern is "
                "rewarded.",
                change=f"{history.recipe.less('optimizer.lr')}; {_clip_higher(history)}{history.recipe.warmer()}a "
                "reference (reference: start). What is lost does not come back: begin again, or go on from a "
                "checkpoint before it fell.",
            )
        if exploded(entropy, before):
            return Finding(
                seen=seen,
                means="The policy falls apart: its tokens become random. Usually the steps are too large, negative "
                "advantages push tokens down without end, or trainer and engine disagree (see kl_behavior).",
                change=f"{history.recipe.less('optimizer.lr')}; optimizer.max_grad_norm=0.5; a reference "
                "(reference: start); sampling.top_p=0.95 keeps the tail out of what is trained on.",
            )
        return None


def _clip_higher(history: MetricsHistory) -> str:
    """Advice on the upper clip, where the loss has one: it is what lets rare tokens grow (DAPO's clip-higher)."""
    high = history.recipe.get("loss.clip_high")
    return f"loss.clip_high={high + 0.1:.2g} (now {high:g}); " if isinstance(high, float) else ""
