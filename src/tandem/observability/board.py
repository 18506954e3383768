"""What a terminal shows of a run, in lines."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from tandem.observability.loggers.base import kind, parts
from tandem.printable import printable
from tandem.types import Json

BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = (
    "reward", "accuracy", "length", "entropy", "kl_behavior", "ratio/max", "grad_norm", "tokens_per_second",
    "seconds/step",
)  # fmt: skip
"""Metrics whose curves are shown of a run, in this order."""
PERCENT = {"accuracy", "rollouts/truncated", "clip_fraction"}


def settings(config: Mapping[str, Json]) -> list[str]:
    """Summary of a recipe for the terminal's header: model, environment, shape of a step."""
    envs = kind(config.get("env")) or "+".join(config.get("envs") or ())
    kinds = [envs, *(kind(config.get(name)) for name in ("trainable", "sync"))]
    shape = f"{config['groups_per_step']} × {config['group_size']} a step" if "groups_per_step" in config else ""
    lag = f"lag ≤ {most}" if (most := config.get("max_lag")) else ""
    return [text for text in (str(config.get("model", "")).rpartition("/")[2], *kinds, shape, lag) if text]


def event_lines(name: str, fields: Mapping[str, Json]) -> list[str]:
    """An event for people; no lines for those that come too often."""
    if name == "alarm":
        return alarm_lines(fields)
    if name == "completions":
        head = f"answer at step {fields['step']}"
        return [line for sample in fields["samples"] for line in answer_lines(sample, head)]
    if name == "groups_dropped":
        return dropped_lines(fields)
    if name == "wait":
        gave_up = f"{fields['owner']} gave up on {fields['on']} ({fields['reason']})"
        return [f"{gave_up} after {duration(fields['seconds'])}"]
    if name in ("published", "group_dropped"):
        return []
    rest = ", ".join(f"{key} {value}" for key, value in fields.items() if isinstance(value, (str, int, float)))
    return [name.replace("_", " ") + (f" ({rest})" if rest else "")]


def alarm_lines(fields: Mapping[str, Json]) -> list[str]:
    """An alarm in full: what was seen, what it usually means, what to change."""
    since = f", since step {fields['since']}" if fields["since"] != fields["step"] else ""
    return [
        f"ALARM {fields['alarm']} at step {fields['step']}{since}: {fields['seen']}",
        f"  usually: {fields['means']}",
        f"  change:  {fields['change']}",
    ]


def number(value: float, metric: str = "") -> str:
    """Three significant figures, whole numbers from a thousand on; shares as percent."""
    if metric in PERCENT:
        return percent(value)
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e7 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share as percent, with a decimal below ten."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 m 20 s, 2 h 05 m."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def sparkline(values: Sequence[float], width: int, bounds: tuple[float, float] | None = None) -> str:
    """The whole history in ``width`` characters, each the mean of its share; ``bounds``: of the axis, if given."""
    if not values or width < 1:
        return ""
    n = min(width, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = bounds or (min(means), max(means))
    if high == low:
        return BLOCKS[0] * n
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def percent_with_interval(record: Mapping[str, Json]) -> str:
    """``41.0 % [35–48]`` of an evaluation's mean; of one that measured a loss alone, that."""
    if record.get("mean") is None:
        return f"loss {record.get('loss', math.nan):.4g}"
    text = f"{100 * record['mean']:.1f} %"
    if interval := record.get("mean_ci"):
        text += f" [{100 * interval[0]:.0f}–{100 * interval[1]:.0f}]"
    return text


def step_line(step: int, steps: int, metrics: Mapping[str, float], left: float | None) -> str:
    """One step of so many in one line, with the seconds left if they are known."""

    def shown(*labels: tuple[str, str], zeros: bool = True) -> list[str]:
        return [f"{label} {number(metrics[m], m)}" for label, m in labels if m in metrics and (zeros or metrics[m])]

    parts = [f"{step:>{len(str(steps))}}/{steps}"]
    parts += shown(("loss", "loss"), ("tokens", "tokens/trained")) if "demonstrations" in metrics else []
    parts += shown(("reward", "reward"), ("acc", "accuracy"), ("len", "length"))
    parts += shown(("cut", "rollouts/truncated"), ("lag", "lag"), zeros=False)
    if dropped := sum(metrics.get(f"groups/dropped_{why}", 0.0) for why in ("zero_variance", "stale", "failed")):
        parts.append(f"dropped {dropped:.0f} groups")
    parts += shown(("kl", "kl_reference"), ("mismatch", "kl_behavior"), ("grad", "grad_norm"))
    units = (("tokens_per_second", "tok/s"), ("seconds/step", "s"))
    parts += [f"{number(metrics[metric])} {unit}" for metric, unit in units if metric in metrics]
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts).replace(" %", "%")


def evaluation_line(evaluations: Sequence[Mapping[str, Json]]) -> str:
    """The latest evaluation in one line, compared with the first."""
    last, first = evaluations[-1], evaluations[0]
    text = f"evaluation at step {last['step']}: {percent_with_interval(last)}"
    passed = last.get("pass_at") or {}
    if int(k := max(passed, key=int, default="1")) > 1:
        text += f", pass@{k} {100 * passed[k]:.1f} %"
    if "loss" in last and "mean" in last:
        text += f", loss {last['loss']:.4g}"
    if "tasks" in last:
        text += f", {last['tasks']} tasks × {last.get('samples', 1)}"
    if last["step"] != first["step"]:
        text += f"; {percent_with_interval(first)} at step {first['step']}"
    return text


def answer_lines(sample: Mapping[str, Json], head: str) -> list[str]:
    """An answer of the policy with its reward, its task before it: a head, then ``> prompt`` and ``< answer``."""
    reward = "no reward" if sample.get("reward") is None else f"reward {float(sample['reward']):.4g}"
    rewards = sample.get("rewards") or {}
    parts_text = f" ({parts(sample)})" if len(rewards) > 1 else ""
    cut = ", cut by a length limit" if sample.get("truncated") else ""
    gold = f", gold answer {_clean(str(sample['answer']))[:60]}" if sample.get("answer") else ""
    out = [f"{head}, {reward}{parts_text}{cut}: task {_clean(str(sample.get('task', '')))}{gold}"]
    out += [f"  > {line}" for line in _few_lines(str(sample.get("prompt") or ""), 4)]
    out += [f"  < {line}" for line in _few_lines(str(sample.get("text") or ""), 12) or ["(nothing)"]]
    return out + ([f"  failed: {_clean(str(sample['error']))}"] if sample.get("error") else [])


def held_out_lines(record: Mapping[str, Json], config: Mapping[str, Json]) -> list[str]:
    """The first answer of an evaluation: the same task each time. None where the recipe has answers not shown."""
    shows = (config.get("print_completions") or {}).get("every", 1)
    samples = record.get("rollouts") or []
    return answer_lines(samples[0], "  its first answer") if shows and samples else []


def best_and_worst(samples: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """The answer with the highest reward and the one with the lowest; one where all have the same."""
    ranked = sorted(samples, key=lambda sample: -math.inf if sample.get("reward") is None else float(sample["reward"]))
    if not ranked:
        return []
    return [ranked[0]] if ranked[0].get("reward") == ranked[-1].get("reward") else [ranked[-1], ranked[0]]


def _few_lines(text: str, most: int, width: int = 240) -> list[str]:
    """The first and last lines of a text, none of them long, without control characters."""
    lines = [_clean(line) for line in text.strip().splitlines() if line.strip()]
    lines = [line if len(line) <= width else f"{line[: width - 40]} [...] {line[-34:]}" for line in lines]
    if len(lines) <= most:
        return lines
    head = most // 2
    return [*lines[:head], f"[... {len(lines) - most + 1} lines ...]", *lines[head - most + 1 :]]


def _clean(text: str) -> str:
    """A text of somebody else's without what a terminal would obey; white space is one space."""
    return printable(" ".join(text.split()))


def dropped_lines(fields: Mapping[str, Json]) -> list[str]:
    """Groups that were dropped while a step was sampled: one line, or with an example and what to change."""
    why = sorted(fields["why"].items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{count} {'with ' * reason.startswith('every')}{reason}" for reason, count in why[:3])
    more = f", {sum(count for _, count in why[3:])} others" * (len(why) > 3)
    count = fields["dropped"]
    head = f"step {fields['step']}: {count} group{'s' * (count > 1)} dropped so far: {reasons}{more}"
    out = [f"WARNING {head}" if fields["warning"] else head]
    if any(reason.startswith("every") for reason in fields["why"]):
        out.append("  there is nothing to learn from a group without different rewards: others are sampled for them")
    if "change" in fields:
        out.append(f"  change: {_clean(fields['change'])}")
    return out + answer_lines(fields["example"], "  an answer of theirs")
