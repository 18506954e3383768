"""Loss: a number that is not finite, a policy that one update ruined, or jumps that come again."""

from __future__ import annotations

import math
import statistics
from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.entropy import LOW
from tandem.observability.alarms.history import SOLVED, MetricsHistory, short

WATCHED = ("loss", "grad_norm", "entropy", "kl_behavior", "reward")
"""Metrics that are always finite in a run that is well."""
SCATTER = 20.0
"""Median absolute deviations from the median that are a jump ..."""
LEAST = 0.1
"""... if it is at least as far: losses of GRPO are near 0, where rounding is large beside them."""
FALL, RISE = 0.01, 3.0
"""Part of the entropy of the step before, and nats above it, that no one step of a run that is well comes to: single
steps scatter by a factor of ten."""
KL_JUMP = 1.0
"""Nats per token between sampler and policy that no update of a usual size brings about ..."""
KL_BEFORE = 0.1
"""... if there were fewer at the step before."""
JUMPS, WITHIN = 3, 20
"""As many jumps within as many steps are reported."""


class LossAlarm(Alarm):
    """The loss is not a number, an update was skipped for that, one update ruined the policy, or the loss jumps."""

    name: ClassVar[Name] = "loss"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "grad_norm", "entropy", "kl_behavior")
    confirm: ClassVar[int] = 1

    def look(self, history: MetricsHistory) -> Finding | None:
        return first((self._not_finite(history), self._ruined(history), self._jumps(history)))

    def _not_finite(self, history: MetricsHistory) -> Finding | None:
        odd = [name for name in WATCHED if not math.isfinite(history.newest(name) or 0.0)]
        skipped = history.newest("optimizer/skipped") or 0.0
        if not odd and not skipped:
            return None
        seen = [f"{' and '.join(odd)} is not a finite number"] if odd else []
        updates = "update was" if skipped == 1 else "updates were"
        seen += [f"{skipped:g} {updates} skipped since the gradient was not finite"] if skipped else []
        return Finding(
            seen=f"at {history.now(1)}: {', '.join(seen)}",
            means="Something overflowed: a reward that is infinite, ratios far from 1, weights that a learning rate "
            "too large has broken, or a precision too narrow for it.",
            change=f"Once may pass: such an update is skipped and the weights are kept. If it comes again: "
            f"{history.recipe.less('optimizer.lr')}; dtype=float32; look at the rewards of that step's rollouts.",
        )

    def _ruined(self, history: MetricsHistory) -> Finding | None:
        """The newest step's policy has little in common with that of the step before."""
        window = history.now(2)
        if window is None or (history.newest("accuracy") or 0.0) >= SOLVED:
            return None
        (_, before), (_, now) = window.rows
        was, entropy = before.get("entropy", 0.0), now.get("entropy", 0.0)
        kl_was, kl = before.get("kl_behavior", 0.0), now.get("kl_behavior", 0.0)
        seen = []
        if was >= LOW and (entropy <= FALL * was or entropy >= was + RISE):
            seen.append(f"entropy went from {short(was)} to {short(entropy)} nats per token")
        if kl > KL_JUMP and kl_was < KL_BEFORE and not history.recipe.grammar:
            seen.append(f"kl_behavior went from {short(kl_was)} to {short(kl)} nats per token")
        if not seen:
            return None
        return Finding(
            seen=f"within one step ({window}) {' and '.join(seen)}",
            means="One update made another policy of it, which is usually worth nothing: the learning rate is far too "
            "large, or the gradient was far outside the others. The tasks are not to blame.",
            change=f"{history.recipe.less('optimizer.lr', 10.0)}; optimizer.max_grad_norm=0.5. What is lost does not "
            "come back: begin again, or from the weights of a checkpoint before it.",
        )

    def _jumps(self, history: MetricsHistory) -> Finding | None:
        window = history.now(WITHIN) or history.now(WITHIN // 2)
        losses = window.values("loss") if window else []
        if window is None or len(losses) < WITHIN // 2:
            return None
        usual = statistics.median(losses)
        scatter = statistics.median(abs(loss - usual) for loss in losses)
        far = max(LEAST, SCATTER * scatter, 10 * abs(usual))
        jumps = [loss for loss in losses if abs(loss - usual) > far]
        if len(jumps) < JUMPS:
            return None
        return Finding(
            seen=f"loss jumped {len(jumps)} times in {window}, to {short(max(jumps, key=abs))} where {short(usual)} is "
            "the median",
            means="A few samples dominate a step: ratios far from 1, a reward far outside the others, or a KL penalty "
            "that has grown.",
            change=f"{history.recipe.less('optimizer.lr')}; rewards within a bounded range; corrections: [token]; see "
            "the alarms kl_behavior and ess.",
        )
