"""Alarms: patterns in the metrics of the latest steps that usually mean that training is going wrong.

``ALARMS`` is the table: each alarm has some patterns, and a pattern is a metric, the window it is compared with, a
test, and advice. ``AlarmWatch`` looks for all of them after every step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.observability.metrics_history import (
    EARLIER,
    GROUPS,
    NOW,
    SOLVED,
    START,
    ZERO_VARIANCE,
    MetricsHistory,
    RecipeOptions,
    Window,
    percent,
    short,
)  # fmt: skip
from tandem.types import Json

Name = Literal[
    "reward_hacking", "length", "entropy", "zero_variance", "kl_behavior", "ess", "grad_norm", "loss", "environments",
    "grading",
]  # fmt: skip
"""Every alarm, as recipes, events and metrics call it."""

LOW_ENTROPY = 0.05
"""Nats per token below which the policy is nearly certain."""
JUMPS, JUMPS_WITHIN = 3, 20
"""Jumps of a metric within so many steps that raise an alarm."""
GRACE_STEPS = 32
"""Steps for which the main reward may stand still after a lesser one rose: the form is often learned first."""
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


Pattern = Callable[[MetricsHistory], Finding | None]
"""A pattern, looked for at the newest step."""
Advice = Callable[[RecipeOptions], str]
"""What to change, with values of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A row of the table."""

    name: Name
    """Its name in recipes, events and metrics."""
    metrics: tuple[str, ...]
    """Metrics concerned, the most telling first; the report marks their charts."""
    patterns: tuple[Pattern, ...]
    """The first that shows is reported."""
    confirm: int = 3
    """Consecutive steps that must show one before it is reported."""

    def look(self, history: MetricsHistory) -> Finding | None:
        """The first pattern that the newest steps show."""
        findings = (pattern(history) for pattern in self.patterns)
        return next((finding for finding in findings if finding is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """The median of a metric against its median in earlier windows."""

    metric: str
    seen: str
    """Format of what was seen: ``level``, ``now``, ``before`` and ``then``."""
    test: Callable[[float, float, RecipeOptions], bool]
    """Of the level now, the earlier one and the recipe."""
    means: str
    change: Advice
    spares_learning: bool = False
    """Ignore windows since which the main reward rose."""

    def __call__(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        level = now.median(self.metric)
        if level is None:
            return None
        for then in history.stagnant() if self.spares_learning else history.earlier():
            before = then.median(self.metric)
            if before and self.test(level, before, history.recipe):
                seen = self.seen.format(level=short(level), now=now, before=short(before), then=then)
                if self.spares_learning:
                    seen = f"{seen}, {history.trend(then)}"
                return Finding(seen=seen, means=self.means, change=self.change(history.recipe))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jumps:
    """Several values of a metric far from its median over the latest steps."""

    metric: str
    far: Callable[[float, float], float]
    """Distance from the median that counts as a jump, from the median and the median absolute deviation."""
    means: str
    change: Advice

    def __call__(self, history: MetricsHistory) -> Finding | None:
        window = history.now(JUMPS_WITHIN) or history.now(JUMPS_WITHIN // 2)
        values = window.values(self.metric)
        if len(values) < JUMPS_WITHIN // 2:
            return None
        usual = statistics.median(values)
        far = self.far(usual, statistics.median(abs(value - usual) for value in values))
        jumps = [value for value in values if abs(value - usual) > far]
        if len(jumps) < JUMPS:
            return None
        most = short(max(jumps, key=abs))
        seen = f"{self.metric} jumped {len(jumps)} times in {window}, to {most} where {short(usual)} is the median"
        return Finding(seen=seen, means=self.means, change=self.change(history.recipe))


def collapsed(now: float, before: float) -> bool:
    """True if the policy became certain of its tokens. Both in nats per token."""
    return before > 0 and (now <= 0.1 * before or (now < LOW_ENTROPY and now <= 0.25 * before))


def exploded(now: float, before: float) -> bool:
    """True if the policy's tokens became random. Both in nats per token; 0.7 nats double the choice of tokens."""
    return now >= 2 * before and now - before >= 0.7


def _not_finite(history: MetricsHistory) -> Finding | None:
    watched = ("loss", "grad_norm", "entropy", "kl_behavior", "reward")
    odd = [name for name in watched if not math.isfinite(history.newest(name) or 0.0)]
    skipped = history.newest("optimizer/skipped") or 0.0
    if not odd and not skipped:
        return None
    seen = [f"{' and '.join(odd)} is not a finite number"] if odd else []
    updates = "update was" if skipped == 1 else "updates were"
    seen += [f"{skipped:g} {updates} skipped since the gradient was not finite"] if skipped else []
    return Finding(
        seen=f"at {history.now(1)}: {', '.join(seen)}",
        means="Something overflowed: a reward that is infinite, ratios far from 1, weights broken by too large a "
        "learning rate, or too narrow a precision.",
        change="A single one may pass: such an update is skipped and the weights are kept. If it recurs: "
        f"{history.recipe.less('optimizer.lr')}; dtype=float32; look at the rewards of that step's rollouts.",
    )


def _ruined(history: MetricsHistory) -> Finding | None:
    """One update changed the policy beyond recognition. Entropy of single steps scatters by a factor of ten."""
    window = history.now(2)
    if not window or (history.newest("accuracy") or 0.0) >= SOLVED:
        return None
    (_, before), (_, now) = window.rows
    was, entropy = before.get("entropy", 0.0), now.get("entropy", 0.0)
    kl_was, kl = before.get("kl_behavior", 0.0), now.get("kl_behavior", 0.0)
    seen = []
    if was >= LOW_ENTROPY and (entropy <= 0.01 * was or entropy >= was + 3.0):
        seen.append(f"entropy went from {short(was)} to {short(entropy)} nats per token")
    if kl > 1.0 and kl_was < 0.1 and not history.recipe.grammar:
        seen.append(f"kl_behavior went from {short(kl_was)} to {short(kl)} nats per token")
    if not seen:
        return None
    return Finding(
        seen=f"within one step ({window}) {' and '.join(seen)}",
        means="A single update replaced the policy, usually by a useless one: the learning rate is far too large, or "
        "the gradient was an outlier. The tasks are not to blame.",
        change=f"{history.recipe.less('optimizer.lr', 10.0)}; optimizer.max_grad_norm=0.5. What is lost does not "
        "come back: start again, or from the weights of a checkpoint before it.",
    )


def _bonus_hacked(history: MetricsHistory) -> Finding | None:
    """A lesser reward rises by a quarter of its scale and the main one does not follow."""
    now, recent, recipe = history.now(), history.now(EARLIER), history.recipe
    for then in history.earlier():
        goal, goal_before = recent.mean(recipe.goal), history.around(then).mean(recipe.goal)
        if goal is None or goal_before is None or history.rises(then):
            continue
        for name, weight in recipe.bonuses.items():
            metric = f"reward/{name}"
            level, before = now.mean(metric), then.mean(metric)
            if level is None or before is None:
                continue
            rise = math.copysign(1, weight) * (level - before) / history.scale(metric)
            if rise < 0.25 or (goal - goal_before) / history.scale(recipe.goal) > 0.1 * rise:
                continue
            hopeless = rise >= 0.5 and goal / history.scale(recipe.goal) <= 0.1
            if not (hopeless or _goal_fell(history, then) or _goal_stands(history, then, metric)):
                continue
            option = "envs.NAME.rewards" if recipe.shares else "rewards"
            return Finding(
                seen=f"reward {name} went from {short(before)} ({then}) to {short(level)} ({now}) "
                f"{history.trend(then)}",
                means=f"The policy is paid by {name} for something that does not solve the task, and learns that "
                "instead: answers have the form without the content, and are usually shorter and all alike.",
                change=f"Read some answers (tandem show --report). Let {name} pay only beside a right answer or for "
                f"more than its form, or lower {option}.{name} (now {weight:g}) to {weight / 10:g} or leave it out; "
                f"{recipe.less('optimizer.lr')}. Where the main reward hardly ever pays, take easier tasks or a "
                "stronger model first.",
            )
    return None


def _goal_fell(history: MetricsHistory, then: Window) -> bool:
    """True if the main reward fell far beyond its scatter."""
    now, goal = history.now(EARLIER), history.recipe.goal
    level, before = now.mean(goal), then.mean(goal)
    if level is None or before is None:
        return False
    return before - level > max(0.1 * history.scale(goal), 3 * (now.error(goal) + then.error(goal)))


def _goal_stands(history: MetricsHistory, then: Window, metric: str) -> bool:
    """True if a lesser reward rose long ago and the main one has not followed, beyond its scatter."""
    whole, goal, start = history.now(GRACE_STEPS + NOW), history.recipe.goal, history.around(then)
    if not whole or whole.first <= then.last:
        return False
    level, before = whole.mean(goal), start.mean(goal)
    if level is None or before is None:
        return False
    if level - before + 2 * math.hypot(whole.error(goal), start.error(goal)) > 0.03 * history.scale(goal):
        return False
    risen, now, was = Window(whole.rows[:NOW]).mean(metric), Window(whole.rows[-NOW:]).mean(metric), then.mean(metric)
    return risen is not None and now is not None and was is not None and abs(risen - was) >= 0.8 * abs(now - was)


def _held_out_fell(history: MetricsHistory) -> Finding | None:
    """Held-out accuracy is below its best, interval beyond interval, while the training reward is not."""
    seen = [(step, row) for step, row in history.evaluations if "eval/mean/low" in row and "eval/mean/high" in row]
    if len(seen) < 2:
        return None
    (best_step, best), (step, last) = max(seen[:-1], key=lambda item: item[1]["eval/mean"]), seen[-1]
    if last["eval/mean/high"] >= best["eval/mean/low"] or last["eval/mean"] >= SOLVED:
        return None
    level = history.now().mean("reward")
    nearest = sorted(history.earlier(), key=lambda window: abs(window.last - best_step))
    before = next((mean for then in nearest if (mean := then.mean("reward")) is not None), None)
    if level is None or before is None or level < before:
        return None

    def interval(row: Mapping[str, float]) -> str:
        return f"{percent(row['eval/mean'])} [{percent(row['eval/mean/low'])}–{percent(row['eval/mean/high'])}]"

    return Finding(
        seen=f"held-out accuracy fell from {interval(best)} at step {best_step} to {interval(last)} at step {step}, "
        f"while the training reward went from {short(before)} to {short(level)}",
        means="The training reward is not what is wanted: it can be earned without the task, or the training tasks "
        "were learned by heart.",
        change=f"Read answers of both evaluations (tandem show --report) and mend the reward; more tasks, "
        f"{history.recipe.less('optimizer.lr')}, or a reference (reference: start); go on from the checkpoint of "
        f"step {best_step} (checkpoint.keep keeps more of them).",
    )


def _cut(history: MetricsHistory) -> Finding | None:
    """Many answers are cut and the share does not fall, unless many that are cut are right."""
    now = history.now()
    cut = now.median("rollouts/truncated")
    if cut is None or cut <= 0.3 or cut + (now.mean("accuracy") or 0.0) > 1.05:
        return None
    for then in history.stagnant():
        before = then.median("rollouts/truncated")
        if len(then.rows) > START and before is not None and before - cut < 0.05:
            return Finding(
                seen=f"{percent(cut)} of answers are cut by a length limit ({now}; {percent(before)} at {then}; "
                f"at most 30 % is usual), {history.trend(then)}",
                means="The answer stands at the end: one that is cut earns nothing whatever it says, so the policy is "
                "punished for thinking, or learns that ending does not matter.",
                change=f"{history.recipe.more('sampling.max_tokens')}, with context large enough; or an instruction "
                "to be brief; truncated: mask leaves such answers out of the loss.",
            )
    return None


def _zero_variance(history: MetricsHistory) -> Finding | None:
    """Too many groups have zero variance, or many more than before, and the tasks are not solved."""
    now, recipe = history.now(EARLIER), history.recipe
    share, accuracy = _zero_variance_share(now), now.mean("accuracy") or 0.0
    if share is None or accuracy >= SOLVED:
        return None
    seen = f"{percent(share)} of groups have zero variance ({now}; at most half is usual)" if share > 0.85 else ""
    for then in history.stagnant() if share >= 0.75 else ():
        before = _zero_variance_share(then)
        if not seen and before is not None and share - before >= 0.3:
            seen = f"{percent(share)} of groups have zero variance ({now}), {percent(before)} at {then}, "
            seen += history.trend(then)
    if not seen:
        return None
    entropy, first = now.median("entropy"), history.start.median("entropy")
    if entropy is not None and first and collapsed(entropy, first):
        return Finding(
            seen=f"{seen}; entropy is {short(entropy)} nats per token, {short(first)} at {history.start}",
            means="All answers have become alike: the policy is certain of them without being right. Usually the "
            "updates were too large; the tasks are not to blame.",
            change=f"{recipe.less('optimizer.lr')}; {recipe.warmer()}what is lost does not come back: start again, or "
            "from the weights of a checkpoint before it.",
        )
    solved, tasks = ("Hardly any", "Easier tasks or a stronger model") if accuracy < 0.5 else ("Most", "Harder tasks")
    return Finding(
        seen=f"{seen}; accuracy is {percent(accuracy)}, reward/std {short(now.mean('reward/std') or 0.0)}",
        means=f"{solved} answers solve these tasks, or answers have become all alike: siblings earn the same, no "
        "advantage is left, and sampling is wasted.",
        change=f"{tasks}; curriculum: solve_rate; {recipe.more('group_size')}; {recipe.warmer()}where answers became "
        "alike, see the alarms entropy and length.",
    )


def _zero_variance_share(window: Window) -> float | None:
    """Share of all environments' groups with zero variance; None for fewer than 16 groups."""
    groups = window.total(GROUPS)
    return window.total(ZERO_VARIANCE) / groups if groups >= 16 else None


def _starved(history: MetricsHistory) -> Finding | None:
    """An environment of a mixture gave no group in ten steps, where five were due."""
    window = history.now(10)
    trained = window.total("groups/trained")
    for name, share in history.recipe.shares.items():
        if window.total(f"env/{name}/trained") or share * trained < 5:
            continue
        groups, zero_variance = window.total(f"env/{name}/groups"), window.mean(f"env/{name}/zero_variance")
        without_variance = f", {percent(zero_variance)} with zero variance" if zero_variance else ""
        return Finding(
            seen=f"no group of environment {name} was trained on in {window}, of {trained:g} in all, where its share "
            f"is {percent(share)}; {groups:g} groups of it were played{without_variance}",
            means="The mixture goes on without it: its tasks are too hard or too easy for any variance, its rollouts "
            "fail, or its episodes take much longer than the others'.",
            change=f"Look at its rewards and errors (events.jsonl, logs/run.log). Easier or harder tasks in "
            f"envs.{name}.env; envs.{name}.min_share={share / 2:.2g}; or take it out of envs.",
        )
    return None


def _environment_failed(history: MetricsHistory) -> Finding | None:
    now = history.now()
    rollouts = _rollouts(history, now)
    failed = now.total("rollouts/failed") - sum(now.total(f"grading/failed_{why}") for why in FAILURES)
    if not rollouts or failed < 0.2 * rollouts:
        return None
    return Finding(
        seen=f"{percent(failed / rollouts)} of rollouts failed in their environment ({now}: {failed:g} of "
        f"{rollouts:g})",
        means="An environment raises, or something it needs (a tool, a service, a sandbox) does not answer; failed "
        "rollouts are left out of their groups.",
        change="logs/run.log has each error with its traceback; mend the environment, or leave it out.",
    )


def _environment_slow(history: MetricsHistory) -> Finding | None:
    """The trainer waits for most of a step: three times as long as before, or with a broker for nearly all of it."""
    now, recipe = history.now(), history.recipe
    step, wait = now.median("seconds/step"), now.median("seconds/wait")
    if not step or wait is None or wait < max(1.0, 0.7 * step):
        return None
    seen = f"the trainer waits for {percent(wait / step)} of a step ({now})"
    if not (recipe.broker and wait >= 0.9 * step):
        slower = ((_slowdown(history, now, then), then) for then in history.earlier())
        slowest = next(((times, then) for times, then in slower if times >= 3), None)
        if slowest is None:
            return None
        seen += f", {short(slowest[0])} times as long for what is sampled as at {slowest[1]}"
    lag = recipe.get("max_lag")
    overlap = f"max_lag={lag + 1} (now {lag})" if isinstance(lag, int) else "a larger lag_control.max_lag"
    return Finding(
        seen=seen,
        means="Rollouts arrive too slowly: environments or their services are slow, the engine is shared with others, "
        "or too few workers play.",
        change="tandem why runs/NAME says who waits for whom. "
        + ("More workers (tandem work), or more engines for them." if recipe.broker
           else f"A faster environment; {overlap} lets sampling overlap with training."),
    )  # fmt: skip


def _slowdown(history: MetricsHistory, now: Window, then: Window) -> float:
    """How many times as long the trainer waits, for a token or a rollout, whichever is less: lengths may change."""
    wait, before = now.median("seconds/wait"), then.median("seconds/wait")
    tokens, tokens_then = now.mean("tokens/generated"), then.mean("tokens/generated")
    rollouts, rollouts_then = (_rollouts(history, w) / len(w.rows) for w in (now, then))
    if not (wait and before and tokens and tokens_then and rollouts and rollouts_then):
        return 0.0
    return wait / before / max(1.0, tokens / tokens_then, rollouts / rollouts_then)


def _rollouts(history: MetricsHistory, window: Window) -> float:
    """Rollouts played in a window."""
    size = history.recipe.get("group_size")
    return window.total(GROUPS) * (size if isinstance(size, int) else 1)


def _grading_failed(history: MetricsHistory) -> Finding | None:
    now = history.now()
    counts = {why: now.total(f"grading/failed_{why}") for why in FAILURES}
    rollouts, lost = _rollouts(history, now), sum(counts.values())
    if not rollouts or lost < max(NOW, 0.1 * rollouts):
        return None
    reasons = ", ".join(f"{count:g} {why}" for why, count in counts.items() if count)
    return Finding(
        seen=f"graders gave no reward for {percent(lost / rollouts)} of rollouts ({now}: {reasons} of {rollouts:g})",
        means="Answers without a reward are not trained on, and not at random: they are usually the long or odd ones, "
        "which biases what is learned.",
        change="logs/graders.log says why. "
        + ("A larger grading.timeout_seconds, or a faster reward." if counts["timeout"] == max(counts.values())
           else "Mend the reward: it should return 0 for what it cannot read, and raise only for its own faults."),
    )  # fmt: skip


def _grading_slow(history: MetricsHistory) -> Finding | None:
    """Graders work for half of a step or more while the trainer waits."""
    now, recipe = history.now(), history.recipe
    step, wait, busy = (now.median(name) for name in ("seconds/step", "seconds/wait", "grading/busy_seconds"))
    if not step or wait is None or busy is None or min(busy, wait) < 0.5 * step:
        return None
    overlap = "" if recipe.get("max_lag") else "max_lag=1, so that grading overlaps with training; "
    return Finding(
        seen=f"graders are at work for {short(busy)} s of a step of {short(step)} s ({now}), and the trainer waits "
        f"for {short(wait)} s of it",
        means="Engine and trainer stand still for the graders: a reward is slow (a judge, code that is run, symbolic "
        "mathematics), or there are too few processes for it.",
        change=f"{recipe.more('grading.workers')}; {overlap}a faster reward, or a smaller grading.timeout_seconds "
        "where a few answers take all of it.",
    )


def _kl_behavior(history: MetricsHistory) -> Finding | None:
    """Sampler and trainer differ by more than is usual, or by ten times what they did."""
    now, recipe = history.now(), history.recipe
    level = now.median("kl_behavior")
    if level is None or recipe.grammar:
        return None
    seen, limit = "", 0.3 if recipe.off_policy else 0.05
    if level > limit:
        seen = f"at max_lag: {recipe.get('max_lag')} at most {short(limit)} is usual"
    for then in history.earlier():
        before = then.median("kl_behavior")
        if not seen and before is not None and level >= max(10 * before, 0.01):
            seen = f"{short(before)} at {then}"
    if not seen:
        return None
    means = "Engine and trainer compute the same policy differently (another precision, kernel, template or sampling "
    means += "option), or the policy became so sharp that rounding tells."
    change = "tandem mismatch runs/NAME says where they differ. dtype=float32, or corrections: [token]; "
    change += f"{recipe.less('optimizer.lr')}."
    if recipe.off_policy:
        means = "The training data are too far from the policy: too old, or the policy moves too fast for them."
        change = f"{recipe.fresher()}{recipe.less('optimizer.lr')}; corrections: [token], which bounds each token's "
        change += "weight."
    return Finding(seen=f"kl_behavior is {short(level)} nats per token ({now}); {seen}", means=means, change=change)


def _ess(history: MetricsHistory) -> Finding | None:
    """The effective sample size of the ratios to the sampler is low."""
    now, recipe = history.now(), history.recipe
    level = now.median("ess")
    least = 0.5 if recipe.off_policy else 0.8
    if level is None or level >= least or recipe.grammar:
        return None
    return Finding(
        seen=f"ess is {short(level)} of a step's tokens ({now}); at max_lag: {recipe.get('max_lag')} at least "
        f"{short(least)} is usual",
        means="Few tokens bear most of the gradient: ratios between policy and sampler are far from 1, because the "
        "data are old, the policy moves fast, or engine and trainer disagree.",
        change=f"{recipe.fresher()}{recipe.less('optimizer.lr')}; corrections: [token]; tandem mismatch runs/NAME "
        "says where engine and trainer differ.",
    )


def _clip_higher(recipe: RecipeOptions) -> str:
    """Advice on the upper clip, which lets rare tokens grow (DAPO's clip-higher), where the loss has one."""
    high = recipe.get("loss.clip_high")
    return f"loss.clip_high={high + 0.1:.2g} (now {high:g}); " if isinstance(high, float) else ""


def _without_bonuses(recipe: RecipeOptions) -> str:
    """Advice on the lesser rewards, where there are some."""
    names = " and ".join(recipe.bonuses)
    return f"Take {names} out of rewards, or let them pay only beside a right answer. " if names else ""


def _beyond_clip(level: float, before: float, recipe: RecipeOptions) -> bool:
    """True if a gradient norm is ten times what it was and is clipped."""
    clip = recipe.get("optimizer.max_grad_norm")
    return 10 * before < level > (float(clip) if isinstance(clip, (int, float)) else 1.0)


def _near_limit(level: float, before: float, recipe: RecipeOptions) -> bool:
    """True if answers became twice as long and fill half of sampling.max_tokens: reasoning may grow up to there."""
    most = recipe.get("sampling.max_tokens")
    roomy = isinstance(most, int) and level < 0.5 * most
    return level - before >= 12 and level >= 2 * before and not roomy


_EXTREME = (
    "Steps follow a few extreme samples (clipping bounds a step's length, not its direction): the learning rate is too "
    "large, a group's reward is far outside the others', or ratios are far from 1."
)


def _calmer(recipe: RecipeOptions) -> str:
    return (
        f"{recipe.less('optimizer.lr')}; {recipe.less('optimizer.max_grad_norm', 2)}; "
        f"{recipe.more('groups_per_step')}; rewards within a bounded range."
    )


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        name="loss",
        metrics=("loss", "grad_norm", "entropy", "kl_behavior"),
        confirm=1,
        patterns=(
            _not_finite,
            _ruined,
            _Jumps(
                metric="loss",
                far=lambda usual, scatter: max(0.1, 20 * scatter, 10 * abs(usual)),
                means="A few samples dominate a step: ratios far from 1, a reward far outside the others', or a KL "
                "penalty that has grown.",
                change=lambda recipe: (
                    f"{recipe.less('optimizer.lr')}; rewards within a bounded range; corrections: "
                    "[token]; see the alarms kl_behavior and ess."
                ),
            ),
        ),
    ),
    Alarm(name="reward_hacking", metrics=("reward", "accuracy"), patterns=(_bonus_hacked, _held_out_fell)),
    Alarm(
        name="length",
        metrics=("length", "rollouts/truncated"),
        patterns=(
            _Changed(
                metric="length",
                seen="answers have {level} tokens ({now}), {before} at {then}",
                test=lambda level, before, recipe: before >= 12 and level <= 0.25 * before,
                spares_learning=True,
                means="The policy found that saying less earns as much: a reward that does not need the reasoning, a "
                "bonus that a few tokens earn, or a learning rate that broke it.",
                change=lambda recipe: (
                    f"Read some answers (tandem show --report). {_without_bonuses(recipe)}"
                    f"{recipe.less('optimizer.lr')}; a reward that asks for reasoning before the answer; a reference "
                    "(reference: start) holds the policy near its start."
                ),
            ),
            _Changed(
                metric="length",
                seen="answers have {level} tokens ({now}), {before} at {then}",
                test=_near_limit,
                spares_learning=True,
                means="Answers lose nothing by going on: a weakness of the reward or of the loss's normalisation "
                "rewards length, or the policy forgets how to end, and repeats itself.",
                change=lambda recipe: (
                    "Read some answers (tandem show --report). truncated: penalise, or rewards.overlong=0.5, which "
                    "lowers the reward near sampling.max_tokens, or rewards.repetition=0.5; "
                    f"{recipe.less('optimizer.lr')}."
                ),
            ),
            _cut,
        ),
    ),
    Alarm(
        name="entropy",
        metrics=("entropy",),
        patterns=(
            _Changed(
                metric="entropy",
                seen="entropy is {level} nats per token ({now}), {before} at {then}",
                test=lambda level, before, recipe: collapsed(level, before),
                spares_learning=True,
                means="The policy is certain of its answers without being right: siblings become alike, groups lose "
                "their variance, and nothing new is tried. Usually the steps are too large, or one easy pattern is "
                "rewarded.",
                change=lambda recipe: (
                    f"{recipe.less('optimizer.lr')}; {_clip_higher(recipe)}{recipe.warmer()}a "
                    "reference (reference: start). What is lost does not come back: start again, or go on from a "
                    "checkpoint before it fell."
                ),
            ),
            _Changed(
                metric="entropy",
                seen="entropy is {level} nats per token ({now}), {before} at {then}",
                test=lambda level, before, recipe: exploded(level, before),
                spares_learning=True,
                means="The policy falls apart: its tokens become random. Usually the steps are too large, negative "
                "advantages push tokens down without end, or trainer and engine disagree (see kl_behavior).",
                change=lambda recipe: (
                    f"{recipe.less('optimizer.lr')}; optimizer.max_grad_norm=0.5; a reference "
                    "(reference: start); sampling.top_p=0.95 keeps the tail out of the training data."
                ),
            ),
        ),
    ),
    Alarm(name="zero_variance", metrics=("groups/dropped_zero_variance",), patterns=(_zero_variance,)),
    Alarm(name="kl_behavior", metrics=("kl_behavior", "ratio"), patterns=(_kl_behavior,)),
    Alarm(name="ess", metrics=("ess", "ratio"), patterns=(_ess,)),
    Alarm(
        name="grad_norm",
        metrics=("grad_norm",),
        patterns=(
            _Jumps(
                metric="grad_norm",
                far=lambda usual, scatter: max(7 * usual, 10 * scatter),
                means=_EXTREME,
                change=_calmer,
            ),
            _Changed(
                metric="grad_norm",
                seen="grad_norm is {level} ({now}), {before} at {then}",
                test=_beyond_clip,
                means=_EXTREME,
                change=_calmer,
            ),
        ),
    ),
    Alarm(
        name="environments",
        metrics=("seconds/wait", "groups/trained", "rollouts/failed"),
        patterns=(_starved, _environment_failed, _environment_slow),
    ),
    Alarm(
        name="grading",
        metrics=("grading/busy_seconds", "seconds/step", "rollouts/failed"),
        patterns=(_grading_failed, _grading_slow),
    ),
)
"""The table, in the order in which alarms are reported."""

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

    def update(self, alarm: Alarm, finding: Finding | None, step: int) -> Notice | None:
        """Record what was found at a step; returns what to report, if anything."""
        if finding is None:
            self.shown = 0
            self.clear += 1
            if self.notified is None or self.clear < self.clears:
                return None
            self.notified = None
            self.clears = min(2 * self.clears, LONGEST_CLEAR)
            return Notice(alarm=alarm.name, step=step, since=self.since, finding=None)
        if not self.shown and self.notified is None:
            self.since = step
        self.shown += 1
        self.clear = 0
        if self.notified is None and self.shown >= alarm.confirm:
            self.again = AGAIN
        elif self.notified is not None and step - self.notified >= self.again:
            self.again *= 2
        else:
            return None
        self.notified = step
        return Notice(alarm=alarm.name, step=step, since=self.since, finding=finding, metrics=alarm.metrics)


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
        self._episodes = {
            alarm.name: (alarm, _Episode()) for alarm in ALARMS if alarm.name not in (options.get("ignore") or ())
        }
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
        for alarm, episode in self._episodes.values():
            finding = alarm.look(self._history)
            if (notice := episode.update(alarm, finding, step)) is not None:
                notices.append(notice)
            if self._stops and self.ended is None and finding is not None and episode.notified is not None:
                self.ended = Notice(alarm=alarm.name, step=step, since=episode.since, finding=finding)
                self.stop()
        return notices

    def scalars(self) -> dict[str, float]:
        """How many alarms are open, and a 1 for each of them."""
        names = [f"alarms/{name}" for name, (_, episode) in self._episodes.items() if episode.notified is not None]
        return {"alarms": float(len(names)), **dict.fromkeys(names, 1.0)}


def _number(value: Json) -> float:
    """A number of metrics.jsonl, where one that is not finite is null."""
    return float("nan") if value is None else float(value)
