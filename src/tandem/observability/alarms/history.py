"""Metrics of a run as alarms see them: windows of steps, whether the main reward rises, and the recipe's options."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.types import Json

NOW = 5
"""Steps that the newest level is over."""
EARLIER = 8
"""Steps that an earlier level is over."""
AGO = (10, 16, 32, 64)
"""Steps before the newest at which an earlier level ends; the first steps of the run are compared with too."""
START = 3
"""First steps of a run that are a level of their own: what goes wrong at once has no other to be compared with."""
KEPT = max(AGO) + EARLIER + 1
"""Steps that are kept."""
SOLVED = 0.9
"""Share of right answers from which on nothing is missing that could still rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some steps in a row."""

    rows: tuple[tuple[int, Mapping[str, float]], ...]
    """Step and metrics of each."""

    def __str__(self) -> str:
        first, last = self.rows[0][0], self.rows[-1][0]
        return f"step {last}" if first == last else f"steps {first}–{last}"

    @property
    def first(self) -> int:
        """Its first step."""
        return self.rows[0][0]

    @property
    def last(self) -> int:
        """Its last step."""
        return self.rows[-1][0]

    def values(self, metric: str) -> list[float]:
        """Finite values, oldest first; a step may have none."""
        column = (row.get(metric) for _, row in self.rows)
        return [value for value in column if value is not None and math.isfinite(value)]

    def median(self, metric: str) -> float | None:
        """Median over the steps that have a value; None unless more than half do."""
        values = self.values(metric)
        return statistics.median(values) if 2 * len(values) > len(self.rows) else None

    def mean(self, metric: str) -> float | None:
        """Mean over the steps that have a value; None unless more than half do."""
        values = self.values(metric)
        return statistics.fmean(values) if 2 * len(values) > len(self.rows) else None

    def error(self, metric: str) -> float:
        """Standard error of that mean, from the scatter between steps."""
        values = self.values(metric)
        n = len(values)
        if n < 2:
            return 0.0
        mean = math.fsum(values) / n
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)

    def total(self, metric: str) -> float:
        """Sum over the steps."""
        return math.fsum(self.values(metric))


class MetricsHistory:
    """The first steps and the latest ones, and every evaluation."""

    def __init__(self, recipe: RecipeOptions) -> None:
        """Nothing has happened yet.

        Args:
            recipe: of the run.
        """
        self.recipe = recipe
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        """Step and numbers of each evaluation, by their names under ``eval/``."""
        self._start: list[tuple[int, Mapping[str, float]]] = []
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=KEPT)
        self._most: dict[str, float] = {}
        self._earlier: tuple[Window, ...] = ()
        self._risen: dict[tuple[int, int], bool] = {}

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """The metrics of a step; steps come in order."""
        row = {**scalars, **_groups(scalars)}
        self._rows.append((step, row))
        if len(self._start) < EARLIER:
            self._start.append((step, row))
        for name in (self.recipe.goal, *(f"reward/{bonus}" for bonus in self.recipe.bonuses)):
            if math.isfinite(value := abs(row.get(name, 0.0))):
                self._most[name] = max(self._most.get(name, 1.0), value)
        self._earlier = tuple(self._windows())
        self._risen = {}

    def newest(self, metric: str) -> float | None:
        """The newest step's value, finite or not."""
        return self._rows[-1][1].get(metric)

    def now(self, steps: int = NOW) -> Window | None:
        """The newest steps; None while there are not as many."""
        return Window(rows=tuple(self._rows)[-steps:]) if len(self._rows) >= steps else None

    def earlier(self) -> Sequence[Window]:
        """Windows to compare the newest level with: nearest first, the start of the run last."""
        return self._earlier

    @property
    def start(self) -> Window:
        """The first steps of the run; only once there was one."""
        return Window(rows=tuple(self._start[:START]))

    def _windows(self) -> Iterator[Window]:
        rows = tuple(self._rows)
        for ago in AGO:
            if len(rows) >= ago + EARLIER - 2:
                yield Window(rows=rows[max(0, len(rows) - ago - EARLIER) : len(rows) - ago])
        if len(rows) >= START + NOW:
            yield self.start

    def rises(self, then: Window) -> bool:
        """True if the main reward is above that of an earlier window by more than scatter, or is all but full.

        Then what else changed since may be how the policy got better: answers that are right are often shorter.
        """
        key = (then.first, then.last)
        if key not in self._risen:
            self._risen[key] = self._rises(then)
        return self._risen[key]

    def _rises(self, then: Window) -> bool:
        now = self.now(EARLIER)
        if now is None:
            return False
        accuracy = now.mean("accuracy")
        if accuracy is not None and accuracy >= SOLVED:
            return True
        goal = self.recipe.goal
        then = self.around(then)
        level, before = now.mean(goal), then.mean(goal)
        if level is None or before is None:
            return False
        scatter = math.hypot(now.error(goal), then.error(goal))
        return level - before > max(0.03 * self.scale(goal), scatter)

    def around(self, then: Window) -> Window:
        """A window that is long enough for a mean of rewards: the first steps with those after them."""
        if len(then.rows) >= EARLIER // 2:
            return then
        return Window(rows=tuple(self._start))

    def scale(self, metric: str) -> float:
        """What counts as much of a reward: 1, as most rewards go from 0 to 1, or the most that was seen."""
        return self._most.get(metric, 1.0)

    def goal(self, then: Window) -> str:
        """How the main reward went since an earlier window, in words; empty if it has none."""
        now = self.now(EARLIER)
        metric = self.recipe.goal
        level, before = None if now is None else now.mean(metric), self.around(then).mean(metric)
        if level is None or before is None:
            return ""
        return f"while {metric} went from {short(before)} to {short(level)}"


GROUPS, ZERO_VARIANCE = "groups/played", "groups/zero_variance"
"""Groups of a step, of all environments, trained or not; and those of them whose rewards are all equal."""


def _groups(scalars: Mapping[str, float]) -> dict[str, float]:
    """Both, from the numbers of each environment."""
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
    """A share as percent: two figures below ten, none after the point above."""
    return f"{100 * share:.1f} %" if abs(share) < 0.1 and share else f"{100 * share:.0f} %"


class RecipeOptions:
    """A resolved recipe as plain data."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        """Nothing is checked: the recipe was read already.

        Args:
            config: the recipe with every option, as a run's loggers get it.
        """
        self._config = config
        sources = config.get("envs") or {}
        rewards = [source.get("rewards") or {} for source in sources.values()] or [config.get("rewards") or {}]
        weights = [{name: _weight(spec) for name, spec in each.items()} for each in rewards]
        goals = {max(each, key=lambda name: each[name]) for each in weights if each}
        self.bonuses: Mapping[str, float] = {
            name: weight for each in weights for name, weight in each.items() if name not in goals and weight
        }
        """Weight of each reward that is the largest of no environment."""
        self.shares: Mapping[str, float] = _shares(sources)
        """Share of the groups that each of several environments is to give."""
        self.elsewhere = bool(config.get("broker"))
        """True if a broker brings the groups."""
        if not any(weights):
            self.goal = "reward"
        elif len(weights) == 1:
            self.goal = f"reward/{next(iter(goals))}"
        else:
            self.goal = "accuracy"
        self.off_policy = bool(config.get("max_lag")) or self.elsewhere or bool(self.get("replay.size"))
        """True if what is trained on may be older than the policy."""
        self.grammar = bool(self.get("sampling.regex"))
        """True if the sampler's logprobs are of what a grammar allows: then they differ from the policy's by right."""

    def get(self, path: str) -> Json:
        """An option by its dotted path; None if there is none."""
        value: Json = self._config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def less(self, path: str, by: float = 4.0) -> str:
        """``optimizer.lr=5e-06 (now 2e-05)``: an option at a part of what it is."""
        value = self.get(path)
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        return f"{path}={value / by:.2g} (now {value:.3g})" if known else f"a smaller {path}"

    def warmer(self) -> str:
        """Advice to sample at temperature 1, where it is lower."""
        now = self.get("sampling.temperature")
        return f"sampling.temperature=1 (now {now:g}); " if isinstance(now, (int, float)) and now < 1 else ""

    def fresher(self) -> str:
        """Advice to train on what is less old, where the recipe lets it be old."""
        now = self.get("max_lag")
        if now == "auto":
            return "a smaller lag_control.max_lag or a higher lag_control.ess_floor; "
        return f"a smaller max_lag (now {now}) or max_lag: auto, which keeps to lag_control.ess_floor; " if now else ""

    def more(self, path: str) -> str:
        """``sampling.max_tokens=400 (now 200)``: twice a whole number."""
        value = self.get(path)
        known = isinstance(value, int) and not isinstance(value, bool)
        return f"{path}={2 * value} (now {value})" if known else f"a larger {path}"


def _weight(spec: Json) -> float:
    return float(spec.get("weight", 1.0)) if isinstance(spec, Mapping) else float(spec)


def _shares(sources: Mapping[str, Json]) -> dict[str, float]:
    """Shares by weight, at least as large as asked for."""
    total = sum(float(source.get("weight", 1.0)) for source in sources.values())
    return {
        name: max(float(source.get("weight", 1.0)) / total, float(source.get("min_share") or 0.0))
        for name, source in sources.items()
        if total > 0
    }
