"""Headline numbers of a run, its alarms by episode, and in a sentence what a person should know of it first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from tandem.observability.loggers.base import WAITING, kind, option, phases
from tandem.observability.report.folder import ENDS, RECENT, STARTS, Row, RunFolder
from tandem.types import Json

WINDOW = 5
"""Steps over which first and last values are averaged: a tenth of the run where that is more, at most half of it."""

_GOING = {"alive": "running", "gone": "killed", "": "unfinished"}


class Summary(TypedDict):
    """Headline of a run. Shares are 0..1, times in seconds; None is unknown."""

    status: str
    """running | finished | interrupted | failed | killed | unfinished | not started."""
    error: str | None
    """What ended a run that failed."""
    steps: int
    """Optimizer steps taken."""
    steps_planned: int | None
    """Optimizer steps the recipe asks for."""
    started: float | None
    """Unix time of the first event or row."""
    seconds: float
    """Time the run was running, pauses between a kill and a resume left out."""
    resumes: int
    """How often it was resumed."""
    before: Row | None
    """First evaluation: step, mean, ci, pass_k, pass, pass_ci, tasks, samples."""
    after: Row | None
    """Last evaluation, if there are two."""
    beyond_interval: bool
    """True if the intervals of before and after do not touch and after is better."""
    reward_first: float | None
    """Mean training reward of the first steps."""
    reward_last: float | None
    """Mean training reward of the last steps."""
    reward_window: int
    """Steps in either of the two."""
    tokens_per_second: float | None
    """Median over steps."""
    tokens_generated: float
    """Sampled tokens of all steps."""
    seconds_per_step: float | None
    """Mean over steps."""
    facts: list[tuple[str, str]]
    """Settings worth a glance: label and value."""


def summarise(run: RunFolder) -> Summary:
    """Headline numbers of a run, finished or not."""
    rewards = column(run, "reward")
    window = max(min(len(rewards), 1), min(max(WINDOW, len(rewards) // 10), len(rewards) // 2))
    evaluations = headline_evaluations(run)
    before = evaluations[0] if evaluations else None
    after = evaluations[-1] if len(evaluations) > 1 else None
    planned = run.config.get("steps")
    steps = run.metrics[-1]["step"] if run.metrics else 0
    speeds, seconds = column(run, "tokens_per_second"), column(run, "seconds/step")
    starts, active = _running(run)
    return Summary(
        status=_status(run, steps, planned),
        error=None if run.process == "alive" or (failure := failed(run.events)) is None else failure[1],
        steps=steps,
        steps_planned=planned if isinstance(planned, int) else None,
        started=min(starts, default=None),
        seconds=active,
        resumes=sum(event.get("event") == "resumed" for event in run.events),
        before=before,
        after=after,
        beyond_interval=_beyond(before, after),
        reward_first=statistics.fmean(rewards[:window]) if window else None,
        reward_last=statistics.fmean(rewards[-window:]) if window else None,
        reward_window=window,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        tokens_generated=sum(column(run, "tokens/generated")),
        seconds_per_step=statistics.fmean(seconds) if seconds else None,
        facts=facts(run.config),
    )


def column(run: RunFolder, metric: str) -> list[float]:
    """Finite values of a metric by step; steps without one are left out."""
    values = (row["metrics"].get(metric) for row in run.metrics)
    return [float(value) for value in values if value is not None]


def headline_evaluations(run: RunFolder) -> list[Row]:
    """Evaluations of what the first one was of, all environments together, in the shape of ``Summary.before``."""
    rows = [row for row in run.evaluations if isinstance(row.get("mean"), (int, float))]
    return [evaluation(row) for row in rows if row.get("env") == rows[0].get("env")]


def evaluations(run: RunFolder) -> list[Row]:
    """Every evaluation in the shape of ``Summary.before``: of all environments together, then of each of several."""
    rows = []
    for row in run.evaluations:
        envs, shared = row.get("envs") or {}, {key: row.get(key) for key in ("step", "samples")}
        parts = [{**shared, **numbers, "env": name} for name, numbers in envs.items()] if len(envs) > 1 else []
        rows += [evaluation(each) for each in (row, *parts) if isinstance(each.get("mean"), (int, float))]
    return rows


def evaluation(row: Row) -> Row:
    """The numbers of an eval.jsonl row, its pass@k being that of the largest k."""
    table = row.get("pass_at") or {}
    k = max(table, key=int, default=None)
    numbers = {key: row.get(key) for key in ("pass_ci", "truncated", "tokens", "tasks", "samples")}
    best = {"pass_k": int(k), "pass": table[k]} if k is not None else {"pass_k": None, "pass": None}
    ci = row.get("mean_ci")
    return {"step": row["step"], "env": row.get("env", ""), "mean": row["mean"], "ci": ci, **best, **numbers}


def facts(config: Row) -> list[tuple[str, str]]:
    """Label and value of the settings that say what a run is."""
    shape = [config.get(key) for key in ("groups_per_step", "group_size")]
    labels = {
        "model": config.get("model"),
        "environment": kind(config.get("env")) or " + ".join(config.get("envs") or ()),
        "trainable": kind(config.get("trainable")),
        "weights travel": kind(config.get("sync")),
        "engine": kind(config.get("engine")),
        "rollouts a step": f"{shape[0]} × {shape[1]}" if all(shape) else None,
        "lag at most": config.get("max_lag"),
        "advantage": kind(config.get("advantage")),
        "loss": kind(config.get("loss")),
        "learning rate": option(config, "optimizer.lr"),
        "temperature": option(config, "sampling.temperature"),
        "new tokens": option(config, "sampling.max_tokens"),
        "dtype": config.get("dtype"),
        "seed": config.get("seed"),
    }
    return [(label, str(value)) for label, value in labels.items() if value is not None and value != ""]


def last_mark(events: Sequence[Mapping[str, Json]]) -> Mapping[str, Json] | None:
    """The event by which a run last began or ended; None if it never did."""
    return next((event for event in reversed(events) if event.get("event") in (*STARTS, *ENDS)), None)


def failed(events: Sequence[Mapping[str, Json]]) -> tuple[float, str] | None:
    """Time and error of a failed run; None if its last command did not end with an error."""
    if (last := last_mark(events)) is None or ENDS.get(last["event"]) != "failed":
        return None
    return float(last.get("time", 0.0)), str(last.get("message") or last.get("why") or "")


def _status(run: RunFolder, steps: int, planned: Json) -> str:
    if run.process == "alive":
        return "running"
    if (last := last_mark(run.events)) is not None and last["event"] in ENDS:
        return ENDS[last["event"]]
    if isinstance(planned, int) and steps >= planned > 0:
        return "finished"
    return _GOING[run.process] if last or steps else "not started"


def _running(run: RunFolder) -> tuple[list[float], float]:
    """Times at which the run (re)started, and seconds it ran: from each start to the last sign of life after it."""
    timed = [row for row in (*run.metrics, *run.events, *run.evaluations) if isinstance(row.get("time"), (int, float))]
    signs = sorted(row["time"] for row in timed)
    if not signs:
        return [], 0.0
    starts = sorted({signs[0], *(row["time"] for row in timed if row.get("event") in STARTS)})
    ends = [*starts[1:], float("inf")]
    active = (
        max(sign for sign in signs if start <= sign and (sign < end)) - start
        for start, end in zip(starts, ends, strict=True)
    )
    return starts, sum(active)


def _beyond(before: Row | None, after: Row | None) -> bool:
    return bool(before and after and before["ci"] and after["ci"] and after["ci"][0] > before["ci"][1])


def episodes(run: RunFolder) -> list[Row]:
    """Each with alarm, since, step (when it was told), over (a step, or None), and what was said.

    What followed a step that the run was resumed from did not happen.
    """
    rows: list[Row] = []
    for event in run.events:
        name, step = event.get("event"), event.get("step")
        if not isinstance(step, int):
            continue
        lasting = [row for row in rows if row["over"] is None and row["alarm"] == event.get("alarm")]
        if name == "resumed":
            rows = [row for row in rows if row["step"] <= step]
            for row in rows:
                row["over"] = None if (row["over"] or 0) > step else row["over"]
        elif name == "alarm_over":
            for row in lasting:
                row["over"] = step
        elif name == "alarm":
            if not lasting:
                lasting = [{"step": step, "over": None}]
                rows += lasting
            texts = {key: event.get(key) for key in ("alarm", "since", "seen", "means", "change", "metrics")}
            lasting[-1].update(texts)
    return rows


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
    """What a person should know of a run first: what failed, what alarms, where its time goes."""
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
