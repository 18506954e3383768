"""Alarms: patterns in the metrics of the latest steps that usually mean that training is going wrong.

They see windows of steps, the trend of the main reward, and the recipe's options (``MetricsHistory``).
``PATTERNS`` is the table: a pattern is a test of the metrics, what it usually means, and advice. ``AlarmWatch`` looks
for all of them after every step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.observability.board import number, percent
from tandem.observability.loggers.base import option
from tandem.types import Json

Name = Literal["loss", "length", "entropy", "zero_variance", "kl_behavior", "failures"]
"""Every alarm, as recipes, events and metrics call it."""

FAILURES = ("timeout", "raised", "bad_value", "crashed", "away")
"""Why a rollout has no reward, as metrics count it under ``grading/failed_``."""

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

    def __init__(self, recipe: Mapping[str, Json]) -> None:
        """Of a run by this recipe."""
        self.recipe = recipe
        sources = recipe.get("envs") or {}
        rewards = [source.get("rewards") or {} for source in sources.values()] or [recipe.get("rewards") or {}]
        weights = [{name: _weight(spec) for name, spec in each.items()} for each in rewards]
        goals = {max(each, key=lambda name: each[name]) for each in weights if each}
        self.goal = "reward" if not goals else "accuracy" if len(weights) > 1 else f"reward/{next(iter(goals))}"
        """Metric of the main reward."""
        self.off_policy = bool(recipe.get("max_lag") or recipe.get("broker") or option(recipe, "replay.size"))
        """True if training data may be older than the policy."""
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
        if math.isfinite(reward := abs(row.get(self.goal, 0.0))):
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
        now, goal, then = self.now(EARLIER), self.goal, self.around(then)
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
        goal = self.goal
        level, before = self.now(EARLIER).mean(goal), self.around(then).mean(goal)
        if level is None or before is None:
            return ""
        return f"while {goal} went from {number(before)} to {number(level)}"


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


def _weight(spec: Json) -> float:
    return float(spec.get("weight", 1.0)) if isinstance(spec, Mapping) else float(spec)


Look = Callable[[MetricsHistory], str]
"""What the newest steps show of a pattern; empty if nothing."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A row of the table: a pattern of the newest steps."""

    alarm: Name
    """The alarm that it raises."""
    look: Look
    means: str
    """What it usually means."""
    change: str
    """What to change."""


PatternMatch = tuple[Pattern, str]
"""A pattern, and what was seen of it: the figures, and what they are compared with."""


def find(alarm: Name, history: MetricsHistory) -> PatternMatch | None:
    """The first pattern of an alarm that the newest steps show."""
    shown = ((pattern, pattern.look(history)) for pattern in PATTERNS if pattern.alarm == alarm)
    return next((match for match in shown if match[1]), None)


def _changed(metric: str, seen: str, test: Callable[[float, float, Json], bool]) -> Look:
    """The median of a metric against earlier ones, unless the main reward has risen since.

    Args:
        metric: its name.
        seen: what was seen, with ``{}`` for the level.
        test: of the level now, the earlier one and the recipe.
    """

    def look(history: MetricsHistory) -> str:
        now = history.now()
        level = now.median(metric)
        for then in history.stagnant():
            before = then.median(metric)
            if level is not None and before and test(level, before, history.recipe):
                return f"{seen.format(number(level))} ({now}), {number(before)} at {then}, {history.trend(then)}"
        return ""

    return look


def _not_finite(history: MetricsHistory) -> str:
    odd = [name for name in METRICS["loss"] if not math.isfinite(history.newest(name) or 0.0)]
    seen = [f"{' and '.join(odd)} is not a finite number"] if odd else []
    if skipped := history.newest("optimizer/skipped") or 0.0:
        updates = "update was" if skipped == 1 else "updates were"
        seen.append(f"{skipped:g} {updates} skipped since the gradient was not finite")
    return f"at {history.now(1)}: {', '.join(seen)}" if seen else ""


def _collapsed(level: float, before: float, recipe: Json) -> bool:
    """True if the policy became certain of its tokens. Both in nats per token."""
    return level <= 0.1 * before or (level < 0.05 and level <= 0.25 * before)


def _exploded(level: float, before: float, recipe: Json) -> bool:
    """True if the policy's tokens became random. Both in nats per token; 0.7 nats double the choice of tokens."""
    return level >= 2 * before and level - before >= 0.7


def _shrunk(level: float, before: float, recipe: Json) -> bool:
    """True if answers lost three quarters of their tokens."""
    return before >= 12 and level <= 0.25 * before


def _near_limit(level: float, before: float, recipe: Json) -> bool:
    """True if answers became twice as long and fill half of sampling.max_tokens: reasoning may grow up to there."""
    most = option(recipe, "sampling.max_tokens")
    roomy = isinstance(most, int) and level < 0.5 * most
    return level - before >= 12 and level >= 2 * before and not roomy


def _cut(history: MetricsHistory) -> str:
    """Many answers are cut and the share does not fall, unless many that are cut are right."""
    now = history.now()
    cut = now.median("rollouts/truncated")
    if cut is None or cut <= 0.3 or cut + (now.mean("accuracy") or 0.0) > 1.05:
        return ""
    for then in history.stagnant():
        before = then.median("rollouts/truncated")
        if len(then.rows) > START and before is not None and before - cut < 0.05:
            seen = f"{percent(cut)} of answers are cut by a length limit ({now}; {percent(before)} at {then})"
            return f"{seen}, {history.trend(then)}"
    return ""


def _zero_variance(history: MetricsHistory) -> str:
    """Too many groups have zero variance, of at least 16, and the tasks are not solved."""
    now = history.now(EARLIER)
    groups, accuracy = now.total(GROUPS), now.mean("accuracy") or 0.0
    if groups < 16 or accuracy >= SOLVED:
        return ""
    share = now.total(ZERO_VARIANCE) / groups
    if share <= 0.85:
        return ""
    figures = f"accuracy is {percent(accuracy)}, reward/std {number(now.mean('reward/std') or 0.0)}"
    return f"{percent(share)} of groups have zero variance ({now}; at most half is usual); {figures}"


def _kl_behavior(history: MetricsHistory) -> str:
    """Sampler and trainer differ by more than is usual, or by ten times what they did."""
    limit = 0.3 if history.off_policy else 0.05
    now, recipe = history.now(), history.recipe
    level = now.median("kl_behavior")
    # Within a grammar the sampler's logprobs are those of what it allows, and differ from the policy's.
    if level is None or option(recipe, "sampling.regex"):
        return ""
    seen = f"kl_behavior is {number(level)} nats per token ({now})"
    if level > limit:
        return f"{seen}; at max_lag: {recipe.get('max_lag')} at most {number(limit)} is usual"
    for then in history.earlier():
        before = then.median("kl_behavior")
        if before is not None and level >= max(10 * before, 0.01):
            return f"{seen}; {number(before)} at {then}"
    return ""


def _failed(history: MetricsHistory) -> str:
    """Many rollouts have no reward, by whatever failed."""
    now, size = history.now(), history.recipe.get("group_size")
    rollouts = now.total(GROUPS) * (size if isinstance(size, int) else 1)
    failed = now.total("rollouts/failed")
    if not rollouts or failed < max(NOW, 0.1 * rollouts):
        return ""
    counts = {why: now.total(f"grading/failed_{why}") for why in FAILURES}
    counts["failed in their environment"] = failed - sum(counts.values())
    reasons = ", ".join(f"{count:g} {why}" for why, count in counts.items() if count > 0)
    return f"{percent(failed / rollouts)} of rollouts have no reward ({now}: {reasons} of {rollouts:g})"


SLOWER = "optimizer.lr / 4"
READ = "Read some answers (tandem show --report)."
REFERENCE = "reference: start"
LOST = "What is lost does not come back: start again, or go on from a checkpoint before it."
ANSWERS, ENTROPY = "answers have {} tokens", "entropy is {} nats per token"

METRICS: Mapping[Name, tuple[str, ...]] = {
    "loss": ("loss", "grad_norm", "entropy", "kl_behavior", "reward"),
    "length": ("length", "rollouts/truncated"),
    "entropy": ("entropy",),
    "zero_variance": ("groups/dropped_zero_variance",),
    "kl_behavior": ("kl_behavior", "ratio", "ess"),
    "failures": ("rollouts/failed",),
}
"""Every alarm, with the metrics that it concerns, the most telling first; the report marks their charts."""
PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "loss", _not_finite,
        "Something overflowed: an infinite reward, ratios far from 1, or too large a learning rate.",
        f"Such an update is skipped, so a single one may pass. If it recurs: {SLOWER}; dtype=float32.",
    ),
    Pattern(
        "length", _changed("length", ANSWERS, _shrunk),
        "The policy found that saying less earns as much: the reward does not need the reasoning.",
        f"{READ} Let bonuses pay only beside a right answer; {SLOWER}; {REFERENCE}.",
    ),
    Pattern(
        "length", _changed("length", ANSWERS, _near_limit),
        "Answers lose nothing by going on: the reward or the loss's normalisation favours length.",
        f"{READ} truncated: penalise, or rewards.overlong=0.5, or rewards.repetition=0.5; {SLOWER}.",
    ),
    Pattern(
        "length", _cut,
        "An answer that is cut earns nothing whatever it says, so the policy is punished for thinking.",
        "sampling.max_tokens * 2, with context large enough; an instruction to be brief; or truncated: mask.",
    ),
    Pattern(
        "entropy", _changed("entropy", ENTROPY, _collapsed),
        "The policy is certain of its answers without being right; groups lose their variance.",
        f"{SLOWER}; a larger loss.clip_high; sampling.temperature=1; {REFERENCE}. {LOST}",
    ),
    Pattern(
        "entropy", _changed("entropy", ENTROPY, _exploded),
        "The policy's tokens become random: steps are too large, or trainer and engine disagree.",
        f"{SLOWER}; optimizer.max_grad_norm=0.5; {REFERENCE}; sampling.top_p=0.95; see the alarm kl_behavior.",
    ),
    Pattern(
        "zero_variance", _zero_variance,
        "Siblings earn the same: the tasks are too hard or too easy, or answers have become alike.",
        "Tasks that some answers solve and others do not; curriculum: solve_rate; group_size * 2; "
                f"where answers became alike (see the alarms entropy and length): {SLOWER}.",
    ),
    Pattern(
        "kl_behavior", _kl_behavior,
        "Engine and trainer compute differently (precision, kernel, template), or training data are too old.",
        "tandem mismatch runs/NAME says where they differ. dtype=float32; a smaller max_lag; "
                f"corrections: [token], which bounds each token's weight; {SLOWER}.",
    ),
    Pattern(
        "failures", _failed,
        "An environment, a tool that it needs, or a reward fails. What is left is not a fair sample to train on.",
        "logs/run.log and logs/graders.log say why. Mend it; after timeouts a larger grading.timeout_seconds.",
    ),
)  # fmt: skip
"""The table: of an alarm the first pattern that shows is reported."""

CONFIRM = 3
"""Consecutive steps that must show a pattern before it is reported; what breaks the loss is told at once."""
CLEAR = 10
"""Consecutive steps without a pattern that end an alarm's first episode; twice as many for each later one, so that an
alarm that comes and goes stays open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An alarm that is raised, or over."""

    alarm: Name
    """Its name."""
    step: int
    """The step after which it is reported."""
    since: int
    """First step that showed it."""
    seen: str = ""
    """The figures, and what they are compared with; empty: it is over."""
    means: str = ""
    """What it usually means."""
    change: str = ""
    """What to change: options of the recipe with values."""

    def fields(self) -> dict[str, Json]:
        """Fields of its event."""
        if self.seen:
            return {**dataclasses.asdict(self), "metrics": list(METRICS[self.alarm])}
        return {"alarm": self.alarm, "step": self.step, "since": self.since}


@dataclass(slots=True)
class _Episode:
    """State of one alarm."""

    alarm: Name
    since: int = 0
    shown: int = 0
    """Consecutive steps that showed a pattern."""
    clear: int = 0
    """Consecutive steps that did not."""
    open: bool = False
    """True from when it is reported until it is over."""
    clears: int = CLEAR
    """Steps without the pattern that end it."""

    def update(self, match: PatternMatch | None, step: int) -> Notice | None:
        """Record what was found at a step; returns what to report, if anything."""
        if match is None:
            self.shown = 0
            self.clear += 1
            if not self.open or self.clear < self.clears:
                return None
            self.open = False
            self.clears *= 2
            return Notice(alarm=self.alarm, step=step, since=self.since)
        if not self.shown and not self.open:
            self.since = step
        self.shown += 1
        self.clear = 0
        if self.open or self.shown < (1 if self.alarm == "loss" else CONFIRM):
            return None
        self.open = True
        return self.notice(match, step)

    def notice(self, match: PatternMatch, step: int) -> Notice:
        """The alarm, as of a step."""
        pattern, seen = match
        texts = {"seen": seen, "means": pattern.means, "change": pattern.change}
        return Notice(alarm=self.alarm, step=step, since=self.since, **texts)


class AlarmWatch:
    """The alarms of one run. All state comes from metrics, so a resumed run has the same."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        """Watch a run.

        Args:
            config: the resolved recipe as plain data; its ``alarms`` say what to ignore and whether to stop.
        """
        options = config.get("alarms") or {}
        self._stops = options.get("action") == "stop"
        self._history = MetricsHistory(config)
        self._episodes = [_Episode(alarm) for alarm in METRICS if alarm not in (options.get("ignore") or ())]
        self.ended: Notice | None = None
        """The alarm that stopped the run."""
        self.stop: Callable[[], None] = lambda: None
        """Called once, when an alarm is open and the recipe asks for a stop."""

    def replay(self, rows: Iterable[Mapping[str, Json]]) -> None:
        """Take in a run's past, the rows of its metrics.jsonl, before it is resumed; without stopping it."""
        stops, self._stops = self._stops, False
        for row in rows:  # a number that was not finite is null there
            self.step(row["step"], {k: math.nan if v is None else float(v) for k, v in row["metrics"].items()})
        self._stops = stops

    def step(self, step: int, scalars: Mapping[str, float]) -> list[Notice]:
        """Take in the metrics of a step; returns what to report after it."""
        self._history.add(step, scalars)
        notices = []
        for episode in self._episodes:
            match = find(episode.alarm, self._history)
            if (notice := episode.update(match, step)) is not None:
                notices.append(notice)
            if self._stops and self.ended is None and match is not None and episode.open:
                self.ended = episode.notice(match, step)
                self.stop()
        return notices

    def scalars(self) -> dict[str, float]:
        """How many alarms are open, and a 1 for each of them."""
        names = [f"alarms/{episode.alarm}" for episode in self._episodes if episode.open]
        return {"alarms": float(len(names)), **dict.fromkeys(names, 1.0)}
