"""The report of a run as one page: one file, no network, nothing of it from anywhere but the run folder."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from tandem.observability.loggers.base import phase
from tandem.observability.report import samples
from tandem.observability.report.folder import Row, RunFolder, load
from tandem.observability.report.summary import diagnosis, episodes, evaluations, summarise
from tandem.types import Json

SCRIPTS = ("charts.js", "uPlot.iife.min.js", "page.js", "rollouts.js", "runs.js", "start.js")
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
    data = payload(run)
    text = render(run.name, data["diagnosis"], data)
    path = run.path / "report.html"
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
    return path


def render(title: str, sentence: str, data: Row) -> str:
    """The page as text: of a run if it has its data, live if it is to ask for them.

    The sentence is what a browser without JavaScript shows.
    """
    script = "\n".join(asset(name) for name in SCRIPTS)
    asks = "; connect-src 'self'" if data.get("live") else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(title),
        "sentence": html.escape(sentence),
        "style": asset("uPlot.min.css") + asset("report.css"),
        "script": script,
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'{asks}",
        "data": embed(data),
    }
    # In one pass, so that nothing inserted is ever searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], asset("template.html"))


PARTS: Mapping[str, tuple[tuple[str, ...], Callable[[RunFolder], Row]]] = {
    "curves": (
        ("metrics.jsonl", "eval.jsonl"),
        lambda run: {
            "summary": summarise(run),
            "series": columns(run),
            "evaluations": evaluations(run),
            "sampling": phase("seconds/wait", run.config),
        },
    ),
    "events": (
        ("events.jsonl",),
        lambda run: {
            **latest_events(run),
            "alarms": episodes(run),
            "resumed": [event["step"] for event in run.events if event.get("event") == "resumed" and "step" in event],
        },
    ),
    "rollouts": (("rollouts",), lambda run: {"rollouts": samples.collect(run)}),
    "answers": (("eval.jsonl",), lambda run: {"answers": samples.answers(run)}),
    "recipe": (("config.yaml",), lambda run: {"config": run.config_text}),
}
"""What the page shows of a run: by part, the files it is read from, and its JSON values."""


def payload(run: RunFolder) -> Row:
    """Everything that the page shows of a run, as JSON values."""
    out: Row = {"name": run.name, "made": time.time(), "diagnosis": diagnosis(run, summarise(run))}
    for _, part in PARTS.values():
        out |= part(run)
    return out


def latest_events(run: RunFolder, most: int = MOST_EVENTS) -> Row:
    """The last ``most`` events of each name, so that frequent ones do not hide rare ones; and how often each is."""
    counts: dict[str, int] = {}
    kept: list[Row] = []
    for event in reversed(run.events):
        name = str(event.get("event", ""))
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= most:
            kept.append(event)
    return {"events": kept[::-1], "event_counts": dict(sorted(counts.items()))}


def embed(values: Row) -> str:
    """JSON that may stand inside a script element: model output cannot close it or open a comment in it."""
    text = msgspec.json.encode(values).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> str:
    """A file of the page."""
    return resources.files("tandem.observability.report").joinpath(name).read_text(encoding="utf-8")


MOST_POINTS = 800
"""More steps than this are averaged in equal shares."""


def columns(run: RunFolder, most: int = MOST_POINTS, names: tuple[str, ...] = ()) -> dict[str, Json]:
    """``{"steps": [...], "share": steps per point, "values": {name: [...]}, "odd": {name: [steps]}}``.

    A point stands for ``share`` steps and bears the last one's number: their mean, or the largest (smallest) where
    the name ends in ``max`` (``min``). A missing value is None; beside others it is left out of the mean, or 0 of
    ``seconds/``. Of ``names`` alone, if there are some. ``odd`` lists where a value was not finite.
    """
    rows = run.metrics
    share = max(1, -(-len(rows) // most))
    points = [rows[i : i + share] for i in range(0, len(rows), share)]
    known = sorted({name for row in rows for name in row["metrics"] if not names or name in names})
    odd = {name: [row["step"] for row in rows if row["metrics"].get(name, 0.0) is None] for name in known}
    return {
        "steps": [point[-1]["step"] for point in points],
        "share": share,
        "values": {name: [_join(name, point) for point in points] for name in known},
        "odd": {name: steps for name, steps in odd.items() if steps},
    }


def short(value: float) -> float:
    """Six significant figures: what a page can show, at half the size."""
    return float(f"{value:.6g}")


def _join(name: str, rows: Sequence[Row]) -> float | None:
    known = [float(value) for row in rows if (value := row["metrics"].get(name)) is not None]
    if not known:
        return None
    if name.startswith("seconds/"):  # a step without that part, such as a checkpoint, spent no time on it
        return short(sum(known) / len(rows))
    how: Callable[[Sequence[float]], float] = (
        max if name.endswith("/max") else min if name.endswith("/min") else statistics.fmean
    )
    return short(how(known))
