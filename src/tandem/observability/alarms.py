"""Alarms: patterns in the metrics of the latest steps that usually mean that training is going wrong.

``PATTERNS`` is the table: a pattern is a test of the metrics, what it usually means, and advice. ``AlarmWatch`` looks
for all of them after every step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.observability import metrics_history
from tandem.observability.metrics_history import MetricsHistory, RecipeOptions, Window, percent, short
from tandem.types import Json

Name = Literal[
    "loss", "reward_hacking", "length", "entropy", "zero_variance", "kl_behavior", "environments", "grading",
]  # fmt: skip
"""Every alarm, as recipes, events and metrics call it."""

LOW_ENTROPY = 0.05
"""Nats per token below which the policy is nearly certain."""
JUMPS, JUMPS_WITHIN = 3, 20
"""Jumps of a metric within so many steps that raise an alarm."""
FAILURES = ("timeout", "raised", "bad_value", "crashed", "away")
"""Why a rollout has no reward, as metrics count it under ``grading/failed_``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an alarm found at the newest step."""

    seen: str
    """The figures, and what they are compared with."""
    means: str
    """What it usually means."""
    change: str
    """What to change: options of the recipe with values."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A row of the table: a pattern of the newest steps."""

    alarm: Name
    """The alarm that it raises."""
    look: Callable[[MetricsHistory], str]
    """What the newest steps show of it; empty if nothing."""
    means: str
    """What it usually means."""
    change: str
    """What to change."""


def find(alarm: Name, history: MetricsHistory) -> Finding | None:
    """The first pattern of an alarm that the newest steps show."""
    for pattern in PATTERNS:
        if pattern.alarm == alarm and (seen := pattern.look(history)):
            return Finding(seen=seen, means=pattern.means, change=pattern.change)
    return None


def collapsed(now: float, before: float) -> bool:
    """True if the policy became certain of its tokens. Both in nats per token."""
    return before > 0 and (now <= 0.1 * before or (now < LOW_ENTROPY and now <= 0.25 * before))


def exploded(now: float, before: float) -> bool:
    """True if the policy's tokens became random. Both in nats per token; 0.7 nats double the choice of tokens."""
    return now >= 2 * before and now - before >= 0.7


def _changed(
    metric: str, seen: str, test: Callable[[float, float, RecipeOptions], bool]
) -> Callable[[MetricsHistory], str]:
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
                return f"{seen.format(short(level))} ({now}), {short(before)} at {then}, {history.trend(then)}"
        return ""

    return look


def _jumps(metric: str, far: Callable[[float, float], float]) -> Callable[[MetricsHistory], str]:
    """Several values of a metric far from its median over the latest steps.

    Args:
        metric: its name.
        far: the distance that counts as a jump, from the median and the median absolute deviation.
    """

    def look(history: MetricsHistory) -> str:
        window = history.now(JUMPS_WITHIN) or history.now(JUMPS_WITHIN // 2)
        values = [value for value in window.values(metric) if value]  # 0: a step without a gradient
        if len(values) < JUMPS_WITHIN // 2:
            return ""
        usual = statistics.median(values)
        limit = far(usual, statistics.median(abs(value - usual) for value in values))
        jumps = [value for value in values if abs(value - usual) > limit]
        if len(jumps) < JUMPS:
            return ""
        most = short(max(jumps, key=abs))
        return f"{metric} jumped {len(jumps)} times in {window}, to {most} where {short(usual)} is the median"

    return look


def _not_finite(history: MetricsHistory) -> str:
    watched = ("loss", "grad_norm", "entropy", "kl_behavior", "reward")
    odd = [name for name in watched if not math.isfinite(history.newest(name) or 0.0)]
    seen = [f"{' and '.join(odd)} is not a finite number"] if odd else []
    if skipped := history.newest("optimizer/skipped") or 0.0:
        updates = "update was" if skipped == 1 else "updates were"
        seen.append(f"{skipped:g} {updates} skipped since the gradient was not finite")
    return f"at {history.now(1)}: {', '.join(seen)}" if seen else ""


def _ruined(history: MetricsHistory) -> str:
    """One update changed the policy beyond recognition. Entropy of single steps scatters by a factor of ten."""
    window = history.now(2)
    if not window or (history.newest("accuracy") or 0.0) >= metrics_history.SOLVED:
        return ""
    (_, before), (_, now) = window.rows
    was, entropy = before.get("entropy", 0.0), now.get("entropy", 0.0)
    kl_was, kl = before.get("kl_behavior", 0.0), now.get("kl_behavior", 0.0)
    seen = []
    if was >= LOW_ENTROPY and (entropy <= 0.01 * was or entropy >= was + 3.0):
        seen.append(f"entropy went from {short(was)} to {short(entropy)} nats per token")
    if kl > 1.0 and kl_was < 0.1 and not history.recipe.grammar:
        seen.append(f"kl_behavior went from {short(kl_was)} to {short(kl)} nats per token")
    return f"within one step ({window}) {' and '.join(seen)}" if seen else ""


def _bonus_hacked(history: MetricsHistory) -> str:
    """A lesser reward rises by a quarter of its scale, and the main one hardly ever pays or falls."""
    now, recent, recipe = history.now(), history.now(metrics_history.EARLIER), history.recipe
    scale, goal = history.scale(recipe.goal), recent.mean(recipe.goal)
    for then in history.earlier():
        around = history.around(then)
        goal_before = around.mean(recipe.goal)
        if goal is None or goal_before is None or history.rises(then):
            continue
        fell = goal_before - goal > max(0.1 * scale, 3 * (recent.error(recipe.goal) + around.error(recipe.goal)))
        for name, weight in recipe.bonuses.items():
            metric = f"reward/{name}"
            level, before = now.mean(metric), then.mean(metric)
            if level is None or before is None:
                continue
            rise = math.copysign(1, weight) * (level - before) / history.scale(metric)
            hopeless = rise >= 0.5 and goal <= 0.1 * scale
            if rise >= 0.25 and (goal - goal_before) / scale <= 0.1 * rise and (hopeless or fell):
                rewards = f"reward {name} went from {short(before)} ({then}) to {short(level)} ({now})"
                return f"{rewards} {history.trend(then)}"
    return ""


def _held_out_fell(history: MetricsHistory) -> str:
    """Held-out accuracy is below its best, interval beyond interval, while the training reward is not."""
    seen = [(step, row) for step, row in history.evaluations if "eval/mean/low" in row and "eval/mean/high" in row]
    if len(seen) < 2:
        return ""
    (best_step, best), (step, last) = max(seen[:-1], key=lambda item: item[1]["eval/mean"]), seen[-1]
    if last["eval/mean/high"] >= best["eval/mean/low"] or last["eval/mean"] >= metrics_history.SOLVED:
        return ""
    level = history.now().mean("reward")
    nearest = sorted(history.earlier(), key=lambda window: abs(window.last - best_step))
    before = next((mean for then in nearest if (mean := then.mean("reward")) is not None), None)
    if level is None or before is None or level < before:
        return ""

    def interval(row: Mapping[str, float]) -> str:
        return f"{percent(row['eval/mean'])} [{percent(row['eval/mean/low'])}–{percent(row['eval/mean/high'])}]"

    return (
        f"held-out accuracy fell from {interval(best)} at step {best_step} to {interval(last)} at step {step}, "
        f"while the training reward went from {short(before)} to {short(level)}"
    )


def _near_limit(level: float, before: float, recipe: RecipeOptions) -> bool:
    """True if answers became twice as long and fill half of sampling.max_tokens: reasoning may grow up to there."""
    most = recipe.get("sampling.max_tokens")
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
        if len(then.rows) > metrics_history.START and before is not None and before - cut < 0.05:
            seen = f"{percent(cut)} of answers are cut by a length limit ({now}; {percent(before)} at {then})"
            return f"{seen}, {history.trend(then)}"
    return ""


def _zero_variance(history: MetricsHistory) -> str:
    """Too many groups have zero variance, or many more than before, and the tasks are not solved."""
    now = history.now(metrics_history.EARLIER)
    share, accuracy = _zero_variance_share(now), now.mean("accuracy") or 0.0
    if share is None or accuracy >= metrics_history.SOLVED:
        return ""
    figures = f"accuracy is {percent(accuracy)}, reward/std {short(now.mean('reward/std') or 0.0)}"
    if share > 0.85:
        return f"{percent(share)} of groups have zero variance ({now}; at most half is usual); {figures}"
    for then in history.stagnant() if share >= 0.75 else ():
        before = _zero_variance_share(then)
        if before is not None and share - before >= 0.3:
            seen = f"{percent(share)} of groups have zero variance ({now}), {percent(before)} at {then}"
            return f"{seen}, {history.trend(then)}; {figures}"
    return ""


def _zero_variance_share(window: Window) -> float | None:
    """Share of all environments' groups with zero variance; None for fewer than 16 groups."""
    groups = window.total(metrics_history.GROUPS)
    return window.total(metrics_history.ZERO_VARIANCE) / groups if groups >= 16 else None


def _kl_behavior(*, off_policy: bool) -> Callable[[MetricsHistory], str]:
    """Sampler and trainer differ by more than is usual, or by ten times what they did."""
    limit = 0.3 if off_policy else 0.05

    def look(history: MetricsHistory) -> str:
        now, recipe = history.now(), history.recipe
        level = now.median("kl_behavior")
        if level is None or recipe.grammar or recipe.off_policy != off_policy:
            return ""
        seen = f"kl_behavior is {short(level)} nats per token ({now})"
        if level > limit:
            return f"{seen}; at max_lag: {recipe.get('max_lag')} at most {short(limit)} is usual"
        for then in history.earlier():
            before = then.median("kl_behavior")
            if before is not None and level >= max(10 * before, 0.01):
                return f"{seen}; {short(before)} at {then}"
        return ""

    return look


def _environment_failed(history: MetricsHistory) -> str:
    now = history.now()
    rollouts = _rollouts(history, now)
    failed = now.total("rollouts/failed") - sum(now.total(f"grading/failed_{why}") for why in FAILURES)
    if not rollouts or failed < 0.2 * rollouts:
        return ""
    return f"{percent(failed / rollouts)} of rollouts failed in their environment ({now}: {failed:g} of {rollouts:g})"


def _grading_failed(history: MetricsHistory) -> str:
    now = history.now()
    counts = {why: now.total(f"grading/failed_{why}") for why in FAILURES}
    rollouts, lost = _rollouts(history, now), sum(counts.values())
    if not rollouts or lost < max(metrics_history.NOW, 0.1 * rollouts):
        return ""
    reasons = ", ".join(f"{count:g} {why}" for why, count in counts.items() if count)
    return f"graders gave no reward for {percent(lost / rollouts)} of rollouts ({now}: {reasons} of {rollouts:g})"


def _rollouts(history: MetricsHistory, window: Window) -> float:
    """Rollouts played in a window."""
    size = history.recipe.get("group_size")
    return window.total(metrics_history.GROUPS) * (size if isinstance(size, int) else 1)


SLOWER = "optimizer.lr / 4"
READ = "Read some answers (tandem show --report)."
REFERENCE = "reference: start"
LOST = "What is lost does not come back: start again, or go on from a checkpoint before it."
ANSWERS, ENTROPY = "answers have {} tokens", "entropy is {} nats per token"

METRICS: Mapping[Name, tuple[str, ...]] = {
    "loss": ("loss", "grad_norm", "entropy", "kl_behavior"),
    "reward_hacking": ("reward", "accuracy"),
    "length": ("length", "rollouts/truncated"),
    "entropy": ("entropy",),
    "zero_variance": ("groups/dropped_zero_variance",),
    "kl_behavior": ("kl_behavior", "ratio", "ess"),
    "environments": ("rollouts/failed",),
    "grading": ("rollouts/failed",),
}
"""Every alarm, with the metrics that it concerns, the most telling first; the report marks their charts."""
PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "loss", _not_finite,
        "Something overflowed: an infinite reward, ratios far from 1, or too large a learning rate.",
        f"Such an update is skipped, so a single one may pass. If it recurs: {SLOWER}; dtype=float32.",
    ),
    Pattern(
        "loss", _ruined,
        "One update replaced the policy: the learning rate is far too large. The tasks are not to blame.",
        f"optimizer.lr / 10; optimizer.max_grad_norm=0.5. {LOST}",
    ),
    Pattern(
        "loss", _jumps("loss", lambda usual, scatter: max(0.1, 20 * scatter, 10 * abs(usual))),
        "A few samples dominate a step: ratios far from 1, an extreme reward, or a KL penalty that has grown.",
        f"{SLOWER}; rewards within a bounded range; corrections: [token]; see the alarm kl_behavior.",
    ),
    Pattern(
        "loss", _jumps("grad_norm", lambda usual, scatter: max(7 * usual, 10 * scatter)),
        "Steps follow a few extreme samples: clipping bounds a step's length, not its direction.",
        f"{SLOWER}; optimizer.max_grad_norm / 2; groups_per_step * 2; rewards within a bounded range.",
    ),
    Pattern(
        "reward_hacking", _bonus_hacked,
        "The policy is paid for something that does not solve the task: the form without the content.",
        f"{READ} Let that reward pay only beside a right answer, or lower its weight; {SLOWER}.",
    ),
    Pattern(
        "reward_hacking", _held_out_fell,
        "The training reward can be earned without the task, or the training tasks were learned by heart.",
        f"{READ} Mend the reward; more tasks; {SLOWER}; {REFERENCE}; go on from an earlier checkpoint.",
    ),
    Pattern(
        "length", _changed("length", ANSWERS, lambda now, before, recipe: before >= 12 and now <= 0.25 * before),
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
        "entropy", _changed("entropy", ENTROPY, lambda now, before, recipe: collapsed(now, before)),
        "The policy is certain of its answers without being right; groups lose their variance.",
        f"{SLOWER}; a larger loss.clip_high; sampling.temperature=1; {REFERENCE}. {LOST}",
    ),
    Pattern(
        "entropy", _changed("entropy", ENTROPY, lambda now, before, recipe: exploded(now, before)),
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
        "kl_behavior", _kl_behavior(off_policy=False),
        "Engine and trainer compute the same policy differently: another precision, kernel or template.",
        f"tandem mismatch runs/NAME says where they differ. dtype=float32, or corrections: [token]; {SLOWER}.",
    ),
    Pattern(
        "kl_behavior", _kl_behavior(off_policy=True),
        "The training data are too far from the policy: too old, or the policy moves too fast for them.",
        f"a smaller max_lag; {SLOWER}; corrections: [token], which bounds each token's weight.",
    ),
    Pattern(
        "environments", _environment_failed,
        "An environment raises, or a tool or service that it needs does not answer.",
        "logs/run.log has each error with its traceback; mend the environment, or leave it out.",
    ),
    Pattern(
        "grading", _grading_failed,
        "Answers without a reward are not trained on, and not at random: that biases what is learned.",
        "logs/graders.log says why. After timeouts a larger grading.timeout_seconds; else mend the reward.",
    ),
)  # fmt: skip
"""The table: of an alarm the first pattern that shows is reported."""

CONFIRM = 3
"""Consecutive steps that must show a pattern before it is reported; what breaks the loss is told at once."""
CLEAR = 10
"""Consecutive steps without a pattern that end an alarm's first episode; twice as many for each later one."""
LONGEST_CLEAR = 16 * CLEAR
"""Most steps that an episode takes to end."""
AGAIN = 100
"""Steps after which an open alarm is reported again; then after twice as many, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An alarm that is raised, raised again, or over."""

    alarm: str
    """Its name."""
    step: int
    """The step after which it is reported."""
    since: int
    """First step that showed it."""
    finding: Finding | None
    """None: it is over."""
    metrics: tuple[str, ...] = ()
    """Metrics concerned."""

    def fields(self) -> dict[str, Json]:
        """Fields of its event."""
        head: dict[str, Json] = {"alarm": self.alarm, "step": self.step, "since": self.since}
        if self.finding is None:
            return head
        texts = {"seen": self.finding.seen, "means": self.finding.means, "change": self.finding.change}
        return {**head, **texts, "metrics": list(self.metrics)}


@dataclass(slots=True)
class _Episode:
    """State of one alarm."""

    alarm: Name
    since: int = 0
    shown: int = 0
    """Consecutive steps that showed a pattern."""
    clear: int = 0
    """Consecutive steps that did not."""
    notified: int | None = None
    """Step at which it was last reported; None while it is not open."""
    again: int = AGAIN
    clears: int = CLEAR
    """Steps without the pattern that end it; they grow, so that an alarm that comes and goes stays open."""

    def update(self, finding: Finding | None, step: int) -> Notice | None:
        """Record what was found at a step; returns what to report, if anything."""
        if finding is None:
            self.shown = 0
            self.clear += 1
            if self.notified is None or self.clear < self.clears:
                return None
            self.notified = None
            self.clears = min(2 * self.clears, LONGEST_CLEAR)
            return Notice(alarm=self.alarm, step=step, since=self.since, finding=None)
        if not self.shown and self.notified is None:
            self.since = step
        self.shown += 1
        self.clear = 0
        if self.notified is None and self.shown >= (1 if self.alarm == "loss" else CONFIRM):
            self.again = AGAIN
        elif self.notified is not None and step - self.notified >= self.again:
            self.again *= 2
        else:
            return None
        self.notified = step
        return self.notice(finding, step)

    def notice(self, finding: Finding, step: int) -> Notice:
        """The alarm, as of a step."""
        return Notice(alarm=self.alarm, step=step, since=self.since, finding=finding, metrics=METRICS[self.alarm])


class AlarmWatch:
    """The alarms of one run. All state comes from metrics, so a resumed run has the same."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        """Watch a run.

        Args:
            config: the resolved recipe as plain data; its ``alarms`` say what to ignore and whether to stop.
        """
        options = config.get("alarms") or {}
        self._stops = options.get("action") == "stop"
        self._history = MetricsHistory(RecipeOptions(config))
        self._episodes = [_Episode(alarm) for alarm in METRICS if alarm not in (options.get("ignore") or ())]
        self.ended: Notice | None = None
        """The alarm that stopped the run."""
        self.stop: Callable[[], None] = lambda: None
        """Called once, when an alarm is open and the recipe asks for a stop."""

    def replay(self, rows: Iterable[Mapping[str, Json]], evaluations: Sequence[Mapping[str, Json]]) -> None:
        """Take in a run's past before it is resumed, without stopping it.

        Args:
            rows: of metrics.jsonl.
            evaluations: ``step`` and ``scalars`` of each, by step.
        """
        stops, self._stops = self._stops, False
        later = list(evaluations)
        for row in rows:
            while later and later[0]["step"] < row["step"]:
                self.evaluation(later[0]["step"], later.pop(0)["scalars"])
            self.step(row["step"], {name: _number(value) for name, value in row["metrics"].items()})
        for each in later:
            self.evaluation(each["step"], each["scalars"])
        self._stops = stops

    def evaluation(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take in the numbers of an evaluation."""
        self._history.evaluations.append((step, scalars))

    def step(self, step: int, scalars: Mapping[str, float]) -> list[Notice]:
        """Take in the metrics of a step; returns what to report after it."""
        self._history.add(step, scalars)
        notices = []
        for episode in self._episodes:
            finding = find(episode.alarm, self._history)
            if (notice := episode.update(finding, step)) is not None:
                notices.append(notice)
            if self._stops and self.ended is None and finding is not None and episode.notified is not None:
                self.ended = episode.notice(finding, step)
                self.stop()
        return notices

    def scalars(self) -> dict[str, float]:
        """How many alarms are open, and a 1 for each of them."""
        names = [f"alarms/{episode.alarm}" for episode in self._episodes if episode.notified is not None]
        return {"alarms": float(len(names)), **dict.fromkeys(names, 1.0)}


def _number(value: Json) -> float:
    """A number of metrics.jsonl, where one that is not finite is null."""
    return float("nan") if value is None else float(value)
