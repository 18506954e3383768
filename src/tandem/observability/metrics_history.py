"""Metrics of a run as alarms see them: windows of steps, the trend of the main reward, and the recipe's options."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.observability.loggers.base import option
from tandem.types import Json

NOW = 5
"""Steps in the newest window."""
EARLIER = 8
"""Steps in an earlier window."""
AGO = (10, 16, 32, 64)
"""How many steps before the newest one each earlier window ends."""
START = 3
"""First steps of the run, which are a window too: a run that fails at once has no other baseline."""
KEPT = max(AGO) + EARLIER + 1
"""Steps kept."""
SOLVED = 0.9
"""Accuracy from which on the tasks count as solved."""


Row = tuple[int, Mapping[str, float]]
"""A step and its metrics."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive steps; none where the run has not enough."""

    rows: tuple[Row, ...] = ()
    """Oldest first."""

    def __str__(self) -> str:
        first, last = self.rows[0][0], self.rows[-1][0]
        return f"step {last}" if first == last else f"steps {first}–{last}"

    def values(self, metric: str) -> list[float]:
        """Finite values, oldest first; a step may have none."""
        column = (row.get(metric) for _, row in self.rows)
        return [value for value in column if value is not None and math.isfinite(value)]

    def median(self, metric: str) -> float | None:
        """Median of the values; None unless more than half of the steps have one."""
        values = self.values(metric)
        return statistics.median(values) if 2 * len(values) > len(self.rows) else None

    def mean(self, metric: str) -> float | None:
        """Mean of the values; None unless more than half of the steps have one."""
        values = self.values(metric)
        return statistics.fmean(values) if 2 * len(values) > len(self.rows) else None

    def error(self, metric: str) -> float:
        """Standard error of the mean, from the scatter between steps."""
        values = self.values(metric)
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0

    def total(self, metric: str) -> float:
        """Sum over the steps."""
        return math.fsum(self.values(metric))


class MetricsHistory:
    """The first and the latest steps of a run."""

    def __init__(self, recipe: RecipeOptions) -> None:
        self.recipe = recipe
        self._start: list[Row] = []
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._scale = 1.0
        """Scale of the main reward: 1, as most lie between 0 and 1, or its largest value so far."""

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the metrics of a step; steps come in order."""
        row = {**scalars, **group_counts(scalars)}
        if "demonstrations" in scalars:  # a warm start's steps: nothing that follows is to be compared with them
            self._rows.clear()
        self._rows.append((step, row))
        if len(self._start) < EARLIER and "demonstrations" not in scalars:
            self._start.append((step, row))
        if math.isfinite(reward := abs(row.get(self.recipe.goal, 0.0))):
            self._scale = max(self._scale, reward)

    def newest(self, metric: str) -> float | None:
        """The newest step's value, finite or not."""
        return self._rows[-1][1].get(metric)

    def now(self, steps: int = NOW) -> Window:
        """The newest steps; an empty window while there are fewer."""
        return Window(tuple(self._rows)[-steps:]) if len(self._rows) >= steps else Window()

    def earlier(self) -> Sequence[Window]:
        """Windows to compare with: the nearest first, the start of the run last."""
        rows = tuple(self._rows)
        ends = [len(rows) - ago for ago in AGO if len(rows) >= ago + EARLIER - 2]
        windows = [Window(rows[max(0, end - EARLIER) : end]) for end in ends]
        return [*windows, Window(tuple(self._start[:START]))] if len(rows) >= START + NOW else windows

    def stagnant(self) -> list[Window]:
        """Earlier windows since which the main reward has not risen."""
        return [window for window in self.earlier() if not self.rises(window)]

    def rises(self, then: Window) -> bool:
        """True if the main reward rose by more than scatter since an earlier window, or the tasks are solved.

        Then other changes may be how the policy improved: right answers are often shorter.
        """
        now, goal, then = self.now(EARLIER), self.recipe.goal, self.around(then)
        if (now.mean("accuracy") or 0.0) >= SOLVED:
            return True
        level, before = now.mean(goal), then.mean(goal)
        if level is None or before is None:
            return False
        return level - before > max(0.03 * self._scale, math.hypot(now.error(goal), then.error(goal)))

    def around(self, then: Window) -> Window:
        """A window long enough for a mean of rewards: the first steps are extended."""
        return then if len(then.rows) >= EARLIER // 2 else Window(tuple(self._start))

    def trend(self, then: Window) -> str:
        """How the main reward changed since an earlier window, in words; empty if it has no values."""
        goal = self.recipe.goal
        level, before = self.now(EARLIER).mean(goal), self.around(then).mean(goal)
        if level is None or before is None:
            return ""
        return f"while {goal} went from {short(before)} to {short(level)}"


GROUPS, ZERO_VARIANCE = "groups/played", "groups/zero_variance"
"""Groups of a step over all environments, trained or not; and those of them whose rewards are all equal."""


def group_counts(scalars: Mapping[str, float]) -> dict[str, float]:
    """``GROUPS`` and ``ZERO_VARIANCE`` of a step, over its environments."""
    groups = zero_variance = 0.0
    for name, count in scalars.items():
        if name.startswith("env/") and name.endswith("/groups"):
            groups += count
            zero_variance += count * scalars.get(f"{name.removesuffix('groups')}zero_variance", 0.0)
    return {GROUPS: groups, ZERO_VARIANCE: zero_variance}


def short(value: float) -> str:
    """Three significant figures."""
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share as percent, with a decimal below ten."""
    return f"{100 * share:.1f} %" if abs(share) < 0.1 and share else f"{100 * share:.0f} %"


class RecipeOptions:
    """What alarms ask of a resolved recipe."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        self._config = config
        sources = config.get("envs") or {}
        rewards = [source.get("rewards") or {} for source in sources.values()] or [config.get("rewards") or {}]
        weights = [{name: _weight(spec) for name, spec in each.items()} for each in rewards]
        goals = {max(each, key=lambda name: each[name]) for each in weights if each}
        self.goal = "reward" if not goals else "accuracy" if len(weights) > 1 else f"reward/{next(iter(goals))}"
        """Metric of the main reward."""
        self.off_policy = bool(config.get("max_lag") or config.get("broker")) or bool(self.get("replay.size"))
        """True if training data may be older than the policy."""
        self.grammar = bool(self.get("sampling.regex"))
        """True if the sampler's logprobs are renormalised over what a grammar allows, so differ from the policy's."""

    def get(self, path: str) -> Json:
        """An option by its dotted path; None if there is none."""
        return option(self._config, path)


def _weight(spec: Json) -> float:
    return float(spec.get("weight", 1.0)) if isinstance(spec, Mapping) else float(spec)
