"""Reward hacking: a lesser reward rises while the one that matters does not, in training or on held-out tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.history import EARLIER, NOW, SOLVED, MetricsHistory, Window, percent, short

RISE = 0.25
"""Rise of a lesser reward, as a share of its scale, from which on the goal should have moved too."""
WHOLE = 0.5
"""Rise after which a goal that hardly ever pays is not waited for any longer."""
GRACE_STEPS = 32
"""Steps for which the goal may stand still while the lesser reward is up already: a form is often learned first."""
NOTHING = 0.1
"""Share of its scale below which a goal hardly ever pays."""


class RewardHackingAlarm(Alarm):
    """A bonus such as a format reward is collected and the task is not learned."""

    name: ClassVar[Name] = "reward_hacking"
    metrics: ClassVar[tuple[str, ...]] = ("reward", "accuracy")

    def look(self, history: MetricsHistory) -> Finding | None:
        return first((self._bonus(history), self._held_out(history)))

    def _bonus(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        if now is None:
            return None
        findings = (
            self._compared(history, now, then, name, weight)
            for then in history.earlier()
            for name, weight in history.recipe.bonuses.items()
        )
        return first(findings)

    def _compared(self, history: MetricsHistory, now: Window, then: Window, name: str, weight: float) -> Finding | None:
        """A bonus now against then, and the goal beside it."""
        metric, goal = f"reward/{name}", history.recipe.goal
        level, before = now.mean(metric), then.mean(metric)
        recent = history.now(EARLIER)
        goal_level, goal_before = None if recent is None else recent.mean(goal), history.around(then).mean(goal)
        if level is None or before is None or goal_level is None or goal_before is None:
            return None
        rise = (level - before) / history.scale(metric) * (1 if weight > 0 else -1)
        goal_rise = (goal_level - goal_before) / history.scale(goal)
        if rise < RISE or goal_rise > 0.1 * rise or history.rises(then):
            return None
        share = goal_level / history.scale(goal)
        pays_nothing = rise >= WHOLE and share <= NOTHING
        if not (pays_nothing or self._fell(history, then) or self._stays(history, then, metric)):
            return None
        option = "rewards" if not history.recipe.shares else "envs.NAME.rewards"
        return Finding(
            seen=f"reward {name} went from {short(before)} ({then}) to {short(level)} ({now}) {history.goal(then)}",
            means=f"The policy is paid by {name} for something that does not solve the task, and learns that instead: "
            "answers that have the form and not the content, usually shorter and all alike.",
            change=f"Read some answers (tandem show --report). Let {name} pay only beside a right answer or for more "
            f"than its form, or lower {option}.{name} (now {weight:g}) to {weight / 10:g} or leave it out; "
            f"{history.recipe.less('optimizer.lr')}. Where the goal hardly ever pays, take easier tasks or a stronger "
            "model first.",
        )

    def _fell(self, history: MetricsHistory, then: Window) -> bool:
        """True if the goal is below what it was by far more than scatter."""
        now, goal = history.now(EARLIER), history.recipe.goal
        level, before = None if now is None else now.mean(goal), then.mean(goal)
        if now is None or level is None or before is None:
            return False
        return before - level > max(0.1 * history.scale(goal), 3 * (now.error(goal) + then.error(goal)))

    def _stays(self, history: MetricsHistory, then: Window, metric: str) -> bool:
        """True if the bonus has been up for long, and the goal has not followed."""
        whole, goal = history.now(GRACE_STEPS + NOW), history.recipe.goal
        if whole is None or whole.first <= then.last:
            return False
        start = history.around(then)
        level, before = whole.mean(goal), start.mean(goal)
        if level is None or before is None:
            return False
        scatter = math.hypot(whole.error(goal), start.error(goal))
        if level - before + 2 * scatter > 0.03 * history.scale(goal):  # too little is known to say that it stands still
            return False
        risen = Window(rows=whole.rows[:NOW]).mean(metric)
        now, was = Window(rows=whole.rows[-NOW:]).mean(metric), then.mean(metric)
        if risen is None or now is None or was is None:
            return False
        return abs(risen - was) >= 0.8 * abs(now - was)

    def _held_out(self, history: MetricsHistory) -> Finding | None:
        """Held-out accuracy falls below its best beyond both intervals, while training rewards stay or rise."""
        seen = [(step, row) for step, row in history.evaluations if "eval/mean/low" in row and "eval/mean/high" in row]
        if len(seen) < 2:
            return None
        (best_step, best), (step, last) = max(seen[:-1], key=lambda item: item[1]["eval/mean"]), seen[-1]
        rewards = self._trained(history, best_step)
        if last["eval/mean/high"] >= best["eval/mean/low"] or rewards is None or rewards[1] < rewards[0]:
            return None
        if last["eval/mean"] >= SOLVED:
            return None
        return Finding(
            seen=f"held-out accuracy fell from {_interval(best)} at step {best_step} to {_interval(last)} at step "
            f"{step}, while the training reward went from {short(rewards[0])} to {short(rewards[1])}",
            means="What training rewards is not what is wanted: a reward that can be earned without the task, or "
            "training tasks learned by heart.",
            change=f"Read answers of both evaluations (tandem show --report) and mend the reward; more tasks, "
            f"{history.recipe.less('optimizer.lr')}, or a reference (reference: start); go on from the checkpoint of "
            f"step {best_step} (checkpoint.keep keeps more of them).",
        )

    def _trained(self, history: MetricsHistory, since: int) -> tuple[float, float] | None:
        """Training reward around an earlier step and now."""
        now = history.now()
        for then in sorted(history.earlier(), key=lambda window: abs(window.last - since)):
            before = then.mean("reward")
            level = None if now is None else now.mean("reward")
            if before is not None and level is not None:
                return before, level
        return None


def _interval(row: Mapping[str, float]) -> str:
    """A mean and its interval."""
    return f"{percent(row['eval/mean'])} [{percent(row['eval/mean/low'])}–{percent(row['eval/mean/high'])}]"
