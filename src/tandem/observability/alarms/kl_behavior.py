"""KL between sampler and trainer: engine and trainer disagree about the policy, or the data are too old."""

from __future__ import annotations

from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.history import MetricsHistory, Window, short

ON_POLICY, OFF_POLICY = 0.05, 0.3
"""Nats per token that are too much whatever they were before, on policy and off."""
RISE = 10.0
"""Multiple of an earlier value that is a rise ..."""
LEAST = 0.01
"""... if it ends above as many nats."""


class KlBehaviorAlarm(Alarm):
    """The policy that samples differs from the policy that is trained."""

    name: ClassVar[Name] = "kl_behavior"
    metrics: ClassVar[tuple[str, ...]] = ("kl_behavior", "ratio")

    def look(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        level = None if now is None else now.median("kl_behavior")
        if now is None or level is None or history.recipe.grammar:
            return None
        return first(
            (self._much(history, now, level), *(self._rose(history, now, level, w) for w in history.earlier()))
        )

    def _much(self, history: MetricsHistory, now: Window, level: float) -> Finding | None:
        most = OFF_POLICY if history.recipe.off_policy else ON_POLICY
        if level <= most:
            return None
        usual = f"at max_lag: {history.recipe.get('max_lag')} at most {short(most)} is usual"
        return self._finding(history, f"kl_behavior is {short(level)} nats per token ({now}); {usual}")

    def _rose(self, history: MetricsHistory, now: Window, level: float, then: Window) -> Finding | None:
        before = then.median("kl_behavior")
        if before is None or level < max(RISE * before, LEAST):
            return None
        return self._finding(
            history, f"kl_behavior is {short(level)} nats per token ({now}), {short(before)} at {then}"
        )

    def _finding(self, history: MetricsHistory, seen: str) -> Finding:
        if history.recipe.off_policy:
            means = "What is trained on is too far from the policy: it is too old, or the policy moves too fast for it."
            change = (
                f"{history.recipe.fresher()}{history.recipe.less('optimizer.lr')}; corrections: [token], which bounds "
                "the weight of each token."
            )
        else:
            means = (
                "Engine and trainer compute the same policy differently (another precision, kernel, template or "
                "sampling option), or the policy became so sharp that rounding tells."
            )
            change = (
                "tandem mismatch runs/NAME says where they differ. dtype=float32, or corrections: [token]; "
                f"{history.recipe.less('optimizer.lr')}."
            )
        return Finding(seen=seen, means=means, change=change)
