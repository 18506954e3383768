"""What a person should know of a run first, in a sentence: what failed, what alarms, where its time goes."""

from __future__ import annotations

from tandem.observability.loggers.base import WAITING, phases
from tandem.observability.report.folder import RECENT, RunFolder
from tandem.observability.report.summary import Summary, episodes

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
    text = "; ".join(sentences) or "nothing stands out"
    return f"{text[0].upper()}{text[1:]}."
