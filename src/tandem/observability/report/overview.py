"""Runs of a folder on one page, and a sentence on what each does: the report's look, drawn anew as it is asked for."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tandem.observability.loggers.base import WAITING, phases
from tandem.observability.report.folder import RunFolder, load
from tandem.observability.report.page import columns, render
from tandem.observability.report.summary import Summary, episodes, summarise

RECENT = 20
"""Steps that a diagnosis looks at."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>Runs · Tandem</title><style>{style}
main {{ max-width: 1080px; margin: 0 auto; padding: 24px 16px; }}
article {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }}
article {{ margin: 12px 0; overflow-wrap: anywhere; }} article h2 {{ font-size: 1rem; margin: 0; }}
article p {{ margin: 4px 0; }}
svg {{ width: 100%; height: 48px; display: block; }} polyline {{ fill: none; stroke: var(--blue); stroke-width: 1.5;
vector-effect: non-scaling-stroke; }}</style></head><body><main><h1>Runs in {folder}</h1>{runs}</main></body></html>"""


def diagnosis(run: RunFolder) -> str:
    """What a person should know of a run first, in a sentence or two."""
    summary = summarise(run)
    if summary["error"]:
        return f"It failed: {summary['error']}"
    recent = run.metrics[-RECENT:]
    if not recent:
        return f"{summary['status'].capitalize()}; no step is done yet."
    sums = {name: sum(row["metrics"].get(name) or 0.0 for row in recent) for name in recent[-1]["metrics"]}
    sentences = [
        f"Alarm {row['alarm']} since step {row['since']}: {row['seen']}" for row in episodes(run) if row["over"] is None
    ]
    if (by_phase := phases(sums, run.config)) and sums.get("seconds/step"):
        name, seconds = next(iter(by_phase.items()))
        sentences.append(
            f"{seconds / sums['seconds/step']:.0%} of a step is {name}{' for rollouts' * (name == WAITING)}"
        )
    shares = {
        "groups/zero_variance": "groups had equal rewards and taught nothing",
        "rollouts/truncated": "answers were cut",
    }
    for name, what in shares.items():
        values = [row["metrics"][name] for row in recent if row["metrics"].get(name) is not None]
        if values and (share := statistics.fmean(values)) >= 0.2:
            sentences.append(f"{share:.0%} of {what}")
    return "; ".join(sentences) + "."


def run_page(folder: Path) -> str:
    """A run's report as its folder is now, with the diagnosis on top."""
    run = load(folder)
    return render(run).replace("<body>", f'<body><p class="notice">{html.escape(diagnosis(run))}</p>', 1)


def runs_page(folder: Path, cards: Sequence[str]) -> str:
    """The page of all runs."""
    style = resources.files("tandem.observability.report").joinpath("report.css").read_text(encoding="utf-8")
    nothing = "<p>There is no run here yet.</p>"
    return _PAGE.format(style=style, folder=html.escape(str(folder)), runs="".join(cards) or nothing)


def card(folder: Path) -> tuple[float, str]:
    """When a run began, and its part of the page."""
    run = load(folder)
    summary = summarise(run)
    name = html.escape(run.name)
    text = f'<article><h2><a href="run/{name}">{name}</a></h2><p>{html.escape(_line(summary))}</p>'
    text += f"<p>{html.escape(diagnosis(run))}</p>{_curve(run)}</article>"
    return summary["started"] or 0.0, text


def _line(summary: Summary) -> str:
    facts = dict(summary["facts"])
    parts = [summary["status"], f"{summary['steps']} of {summary['steps_planned'] or '?'} steps"]
    parts += [facts[name] for name in ("model", "environment") if name in facts]
    for name, first, last in (
        ("reward", summary["reward_first"], summary["reward_last"]),
        ("held out", *(each["mean"] if each else None for each in (summary["before"], summary["after"]))),
    ):
        parts += [f"{name} {first:.3g} → {last:.3g}"] if first is not None and last is not None else []
    return " · ".join(parts)


def _curve(run: RunFolder) -> str:
    """The reward by step."""
    values = [value for value in columns(run, 300)["values"].get("reward", ()) if value is not None]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    points = " ".join(f"{i},{100 - 100 * (value - low) / ((high - low) or 1):.1f}" for i, value in enumerate(values))
    label = f"reward by step, {low:.3g} to {high:.3g}"
    shape = f'viewBox="0 -4 {len(values) - 1} 108" preserveAspectRatio="none" role="img" aria-label="{label}"'
    return f'<svg {shape}><polyline points="{points}"/></svg>'
