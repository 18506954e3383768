"""What a run's folder tells of the run, as one record."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.observability import json_lines

POINTS = 20
"""Of a curve."""
CURVES = ("reward", "accuracy", "length", "entropy", "kl_behavior", "ess", "probe_gap")
"""Metrics that are kept as curves."""
Row = Mapping[str, Any]


def lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file with one on each line; one that a kill cut off is none."""
    return list(json_lines.read(path))


def steps(folder: Path) -> int:
    """Steps that a run has written down."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def done(folder: Path) -> bool:
    """Whether the run went through all of its steps."""
    return any(event["event"] == "run_done" for event in lines(folder / "events.jsonl"))


def resumable(folder: Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return any(path.name.isdigit() for path in (folder / "checkpoints").glob("*"))


def curve(values: Sequence[float], points: int = POINTS) -> list[float]:
    """Means of consecutive steps, ``points`` of them at most."""
    size = len(values) / min(points, max(1, len(values)))
    edges = [round(i * size) for i in range(round(len(values) / size) + 1)] if values else []
    return [round(statistics.fmean(values[a:b]), 5) for a, b in itertools.pairwise(edges) if b > a]


def _of(metrics: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in metrics if isinstance(row.get(name), int | float)]


def _with(metrics: Iterable[Row], name: str, measure: Callable[[list[float]], float]) -> float | None:
    values = _of(metrics, name)
    return round(measure(values), 6) if values else None


def held_out(folder: Path) -> list[dict[str, Any]]:
    """Every evaluation, without its texts."""
    kept = ("step", "tasks", "samples", "mean", "mean_ci", "pass_at", "truncated", "tokens", "failed", "seconds")
    return [{key: row[key] for key in kept if key in row} for row in lines(folder / "eval.jsonl")]


def alarms(folder: Path) -> list[str]:
    """What was raised over a run's metrics, one text each."""
    events = [event for event in lines(folder / "events.jsonl") if event["event"] == "alarm"]
    return [json.dumps({k: v for k, v in event.items() if k not in ("time", "event")})[:400] for event in events]


def proofs(folder: Path) -> list[str]:
    """Why each proof failed that did: what it wrote down, or what the log has of one that compared bytes."""
    reasons = [json.loads(path.read_text())["why"] for path in sorted((folder / "proofs").glob("*.json"))]
    return [*reasons, *(line for line in log_lines(folder) if "StaleWeights" in line or "TornWeights" in line)]


def asked_again(folder: Path) -> int:
    """Publishes at which a proof was in doubt and more was asked."""
    return sum("is asked again" in line for line in log_lines(folder))


def log_lines(folder: Path) -> list[str]:
    """Of the run's own log, cut where they are long."""
    log = folder / "logs/run.log"
    return [line[:400] for line in log.read_text(errors="replace").splitlines()] if log.exists() else []


def record(folder: Path) -> dict[str, Any]:
    """Everything that a table or a curve of the run needs."""
    rows, events = lines(folder / "metrics.jsonl"), lines(folder / "events.jsonl")
    metrics = [row["metrics"] for row in rows]
    times = {kind: [e["time"] for e in events if e["event"] == kind] for kind in ("run_started", "run_done")}
    begun = times["run_started"][0] if times["run_started"] else None
    tokens = _of(metrics, "tokens/generated")
    summary: dict[str, Any] = {
        "done": bool(times["run_done"]),
        "steps_done": len(rows),
        "held_out": held_out(folder),
        "curves": {name: curve(_of(metrics, name)) for name in CURVES if _of(metrics, name)},
        "tokens_generated": sum(tokens),
        "tokens_to": curve([sum(tokens[: i + 1]) for i in range(len(tokens))]),
        "seconds_to": curve(trained_for(rows, lines(folder / "eval.jsonl"))),
        "training_seconds": round(rows[-1]["time"] - begun, 1) if rows and begun else None,
        "step_seconds": _with(metrics, "seconds/step", statistics.median),
        "sync_seconds": _with(metrics, "seconds/sync", statistics.median),
        "paused_ms": _milliseconds(_with(metrics, "engine/paused_seconds", statistics.median)),
        "publishes": sum(event["event"] == "published" for event in events),
        "probe_gap": _spread(_of(metrics, "probe_gap")),
        "kl_behavior": _spread(_of(metrics, "kl_behavior")),
        "zero_variance_dropped": sum(_of(metrics, "groups/dropped_zero_variance")),
        "alarms": alarms(folder),
        "proofs_failed": proofs(folder),
        "proofs_asked_again": asked_again(folder),
        "resumed": sum(event["event"] == "resumed" for event in events),
        "memory": {name: _ends(_of(metrics, name)) for name in ("memory/rss_gb", "memory/gpu_gb")},
    }
    return summary


def trained_for(rows: Sequence[Row], evaluations: Sequence[Row]) -> list[float]:
    """Seconds from the beginning of the first step to the end of each, evaluations aside."""
    if not rows:
        return []
    begun = rows[0]["time"] - rows[0]["metrics"].get("seconds/step", 0.0)
    looks = [(look["time"], look["seconds"]) for look in evaluations if look["time"] > begun]
    return [row["time"] - begun - sum(seconds for at, seconds in looks if at <= row["time"]) for row in rows]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and largest."""
    return {"median": statistics.median(values), "max": max(values)} if values else None


def _ends(values: Sequence[float]) -> list[float] | None:
    """After a fifth of the steps, and at the end: what starts up is no leak."""
    return [round(values[len(values) // 5], 3), round(values[-1], 3)] if values else None
