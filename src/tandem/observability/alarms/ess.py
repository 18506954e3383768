"""Effective sample size: few tokens bear most of the weight of a step, since their ratios are far from 1."""

from __future__ import annotations

from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name
from tandem.observability.alarms.history import MetricsHistory, short

ON_POLICY, OFF_POLICY = 0.8, 0.5
"""Share of a step's tokens below which it is too low, on policy and off."""


class EssAlarm(Alarm):
    """The effective sample size of the ratios to the sampler is low."""

    name: ClassVar[Name] = "ess"
    metrics: ClassVar[tuple[str, ...]] = ("ess", "ratio")

    def look(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        level = None if now is None else now.median("ess")
        least = OFF_POLICY if history.recipe.off_policy else ON_POLICY
        if now is None or level is None or level >= least or history.recipe.grammar:
            return None
        return Finding(
            seen=f"ess is {short(level)} of a step's tokens ({now}); at max_lag: {history.recipe.get('max_lag')} at "
            f"least {short(least)} is usual",
            means="Few tokens bear most of the gradient: ratios between policy and sampler are far from 1, since the "
            "data are old, the policy moves fast, or engine and trainer disagree.",
            change=f"{history.recipe.fresher()}{history.recipe.less('optimizer.lr')}; corrections: "
            "[token]; tandem mismatch runs/NAME says where engine and trainer differ.",
        )
