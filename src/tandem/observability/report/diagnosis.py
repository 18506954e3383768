"""What a person should know of a run first, in a sentence: what failed, what alarms, where its time and samples go."""

from __future__ import annotations

import statistics

from tandem.observability.loggers.base import WAITING, phases
from tandem.observability.metrics_history import GROUPS, ZERO_VARIANCE, group_counts
from tandem.observability.report.folder import RECENT, RunFolder
from tandem.observability.report.summary import Summary, episodes

MUCH = 0.2
"""Share of groups or answers from which on it is worth a word."""
MOSTLY = 0.5
"""Share of a step from which on there is something to change."""
CHANGES = {
    WAITING: "more engines, or a larger max_lag",
    "sampling": "max_lag: 1 goes on sampling while a step is trained",
    "publish": "trainable: lora has less to publish",
    "evaluation": "a larger evaluate.every, or fewer tasks",
    "checkpoint": "a larger checkpoint.every",
}


def diagnosis(run: RunFolder, summary: Summary) -> str:
    """The sentence."""
    if summary["error"]:
        return f"It failed: {summary['error']}"
    recent = [row["metrics"] for row in run.metrics[-RECENT:]]
    if not recent:
        return f"{summary['status'].capitalize()}; no step is done yet."
    sentences = [
        f"alarm {row['alarm']} since step {row['since']}: {row['seen']}" for row in episodes(run) if row["over"] is None
    ]
    names = {name for metrics in recent for name in metrics}
    sums = {name: sum(metrics.get(name) or 0.0 for metrics in recent) for name in names}
    if (by_phase := phases(sums, run.config)) and sums.get("seconds/step"):
        name, seconds = next(iter(by_phase.items()))
        share = min(1.0, seconds / sums["seconds/step"])
        change = f" ({CHANGES[name]})" if share >= MOSTLY and name in CHANGES else ""
        sentences.append(f"{share:.0%} of a step is {name}{' for rollouts' * (name == WAITING)}{change}")
    counts = [group_counts({name: value or 0.0 for name, value in metrics.items()}) for metrics in recent]
    played, equal = (sum(each[name] for each in counts) for name in (GROUPS, ZERO_VARIANCE))
    if played and equal >= MUCH * played:
        accuracy = _mean(run, "accuracy")
        why = "easier tasks" if accuracy < 0.3 else "harder tasks" if accuracy > 0.7 else "larger groups"
        sentences.append(f"{equal:.0f} of {played:.0f} groups had equal rewards and taught nothing ({why})")
    if (cut := _mean(run, "rollouts/truncated")) >= MUCH:
        sentences.append(f"{cut:.0%} of answers were cut (a larger sampling.max_tokens)")
    text = "; ".join(sentences) or "nothing stands out"
    return f"{text[0].upper()}{text[1:]}."


def _mean(run: RunFolder, metric: str) -> float:
    """Mean of the recent steps; 0 where none has it."""
    values = [value for row in run.metrics[-RECENT:] if (value := row["metrics"].get(metric)) is not None]
    return statistics.fmean(values) if values else 0.0
