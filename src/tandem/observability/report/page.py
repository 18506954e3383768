"""The report of a run as one page: one file, no network, nothing of it from anywhere but the run folder."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from tandem.observability.loggers.base import phase
from tandem.observability.report import samples
from tandem.observability.report.folder import Row, RunFolder, load
from tandem.observability.report.summary import Summary, episodes, evaluations, summarise
from tandem.types import Json

SCRIPTS = ("charts.js", "uPlot.iife.min.js", "page.js", "rollouts.js")
"""Inlined in this order."""
MOST_EVENTS = 60
"""Events of one name that are shown at most."""


def build(folder: Path) -> Path:
    """Write ``report.html`` into a run folder from what the folder holds; a run that is going on or was killed is fine.

    Args:
        folder: the run folder.

    Returns:
        The page's path. It is written aside and renamed.

    Raises:
        TandemError: this is not a run folder.
        OSError: the page cannot be written.
    """
    run = load(folder)
    page = render(run)
    path = run.path / "report.html"
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(page, encoding="utf-8")
    os.replace(aside, path)
    return path


def render(run: RunFolder) -> str:
    """The page as text."""
    summary = summarise(run)
    style = _asset("uPlot.min.css") + _asset("report.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(run.name),
        "headline": html.escape(headline(summary)),
        "style": style,
        "script": script,
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "data": embed(payload(run, summary)),
    }
    page = _asset("template.html")
    # Split once, so that nothing inserted is ever searched for placeholders.
    out = []
    for piece in page.split("{{"):
        name, closing, rest = piece.partition("}}")
        out.append(parts[name] + rest if closing else piece)
    return "".join(out)


def payload(run: RunFolder, summary: Summary) -> Row:
    """Everything the page shows, as JSON values."""
    events, counts = latest_events(run)
    return {
        "name": run.name,
        "made": time.time(),
        "summary": summary,
        "series": columns(run),
        "evaluations": evaluations(run),
        "resumed": [event["step"] for event in run.events if event.get("event") == "resumed" and "step" in event],
        "alarms": episodes(run),
        "events": events,
        "event_counts": counts,
        "answers": samples.answers(run),
        "dropped": samples.dropped(run),
        "rollouts": samples.collect(run),
        "config": run.config_text,
        "sampling": phase("seconds/wait", run.config),
    }


def latest_events(run: RunFolder, most: int = MOST_EVENTS) -> tuple[list[Row], dict[str, int]]:
    """The last ``most`` events of each name, so that frequent ones do not hide rare ones; and how often each is."""
    counts: dict[str, int] = {}
    kept: list[Row] = []
    for event in reversed(run.events):
        name = str(event.get("event", ""))
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= most:
            kept.append(event)
    return kept[::-1], dict(sorted(counts.items()))


def embed(values: Row) -> str:
    """JSON that may stand inside a script element: model output cannot close it or open a comment in it."""
    text = msgspec.json.encode(values).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def headline(summary: Summary) -> str:
    """One sentence on the run, for search engines, screen readers and pages without JavaScript."""
    of = f" of {summary['steps_planned']}" if summary["steps_planned"] else ""
    text = f"{summary['status'].capitalize()}: {summary['steps']}{of} steps."
    if summary["error"]:
        text += f" It failed: {summary['error']}"
    if summary["before"] and summary["after"]:
        text += f" Held-out accuracy {summary['before']['mean']:.1%} before, {summary['after']['mean']:.1%} after."
    if summary["reward_first"] is not None and summary["reward_last"] is not None:
        text += f" Training reward {summary['reward_first']:.3f} first, {summary['reward_last']:.3f} last."
    return text


def _asset(name: str) -> str:
    return resources.files("tandem.observability.report").joinpath(name).read_text(encoding="utf-8")


MOST_POINTS = 1500
"""More steps than this are averaged in equal shares."""


def columns(run: RunFolder, most: int = MOST_POINTS) -> dict[str, Json]:
    """``{"steps": [...], "share": steps per point, "values": {name: [...]}, "odd": {name: [steps]}}``.

    A point stands for ``share`` steps and bears the last one's number: their mean, or the largest (smallest) where
    the name ends in ``max`` (``min``). A missing value is None; beside others it is left out of the mean, or 0 of
    ``seconds/``. ``odd`` lists where a value was not finite.
    """
    rows = run.metrics
    share = max(1, -(-len(rows) // most))
    names = sorted({name for row in rows for name in row["metrics"]})
    chunks = [rows[i : i + share] for i in range(0, len(rows), share)]
    values = {name: [_join(name, [row["metrics"].get(name) for row in chunk]) for chunk in chunks] for name in names}
    odd = {name: [row["step"] for row in rows if row["metrics"].get(name, 0.0) is None] for name in names}
    return {
        "steps": [chunk[-1]["step"] for chunk in chunks],
        "share": share,
        "values": values,
        "odd": {name: steps for name, steps in odd.items() if steps},
    }


def short(value: float) -> float:
    """Six significant figures: what a page can show, at half the size."""
    return float(f"{value:.6g}")


def _join(name: str, values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    if name.startswith("seconds/"):  # a step without that part, such as a checkpoint, spent no time on it
        return short(sum(known) / len(values))
    how: Callable[[Sequence[float]], float] = (
        max if name.endswith("/max") else min if name.endswith("/min") else statistics.fmean
    )
    return short(how(known))
