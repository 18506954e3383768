"""``tandem show`` and ``tandem runs``: a run in a screenful, and each of a folder in a line, from what folders hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tandem.api.targets import recipe_of
from tandem.errors import TandemError, command
from tandem.observability.board import CURVES, alarm_lines, duration, sparkline
from tandem.observability.loggers.base import PHASES, phases
from tandem.observability.report import page
from tandem.observability.report.folder import Row, RunFolder, load
from tandem.observability.report.summary import Summary, column, episodes, headline_evaluations, summarise

_WIDTH = 32
"""Columns of such a line."""


def show(run: Path, write_report: bool) -> None:
    """Print the summary; with ``write_report`` also write report.html anew.

    Raises:
        ConfigError: it is not a run's folder.
        TandemError: the report cannot be written there.
    """
    recipe_of(run)
    folder = load(run)
    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    _print_headline(console, folder)
    if (error := summarise(folder)["error"]) is not None:
        say(f"\nFAILED: {error}", style="red")
        say(f"  go on with: {command('train', run)}; the traceback is in {run / 'logs' / 'run.log'}")
    for line in _alarms(folder):
        say(line)
    _print_evaluations(console, headline_evaluations(folder))
    _print_curves(console, folder)
    if line := _time(folder):
        say(line)
    if write_report:
        try:
            written = page.build(run)
        except OSError as error:
            raise TandemError(f"the report cannot be written: {error}; free disk space, or copy the folder") from error
        say(f"report: {written}")


def _print_headline(console: Console, folder: RunFolder) -> None:
    """What it is, how far it came."""
    summary = summarise(folder)
    planned = summary["steps_planned"]
    steps = f"{summary['steps']} of {planned} steps" if planned else f"{summary['steps']} steps"
    parts = [summary["status"], steps, f"{duration(summary['seconds'])}"]
    if resumes := summary["resumes"]:
        parts.append(f"resumed {resumes} time{'s' * (resumes > 1)}")
    console.print(Text.assemble((folder.name, "bold"), f"  {', '.join(parts)}"))
    console.print("  ".join(f"{label}: {value}" for label, value in summary["facts"]), markup=False, style="dim")


def _print_evaluations(console: Console, rows: Sequence[Row]) -> None:
    """Held-out results by step, with their intervals."""
    if not rows:
        return
    table = Table(title=f"held out: {rows[0]['env']}", title_justify="left", box=None, pad_edge=False)
    for heading in ("step", "mean", "", f"pass@{rows[-1]['pass_k']}", "", "tokens"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["step"]), _number(row["mean"]), _interval(row["ci"]), _number(row["pass"]),
            _interval(row["pass_ci"]), _number(row["tokens"]),
        )  # fmt: skip
    console.print()
    console.print(table)


def _print_curves(console: Console, folder: RunFolder) -> None:
    """One line for each metric: first, curve, last."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for name in CURVES:
        if values := column(folder, name):
            table.add_row(name, _number(values[0]), sparkline(values, _WIDTH), _number(values[-1]))
    if table.row_count:
        console.print()
        console.print(table)


def _alarms(folder: RunFolder) -> Iterator[str]:
    """Alarms that are open in full, and a line for each that is over."""
    for row in episodes(folder):
        if row["over"] is not None:
            yield f"alarm {row['alarm']}, steps {row['since']} to {row['over']}, over: {row['seen']}"
            continue
        yield from ("", *alarm_lines(row))


def _time(folder: RunFolder) -> str:
    """How long each phase took over the whole run, and its share; empty before anything did."""
    spans = {name: sum(column(folder, name)) for name in (f"seconds/{part}" for part in PHASES)}
    spans["seconds/evaluate"] = sum(float(row.get("seconds") or 0.0) for row in folder.evaluations)
    by_phase, total = phases(spans, folder.config), summarise(folder)["seconds"]
    if not by_phase:
        return ""
    if (rest := total - sum(by_phase.values())) > 0.01 * total:
        by_phase["start and the rest"] = rest
    total = max(total, sum(by_phase.values()))  # phases that overlap count in full
    parts = ", ".join(f"{name} {duration(seconds)} ({seconds / total:.0%})" for name, seconds in by_phase.items())
    return f"\ntime: {parts}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _interval(bounds: Sequence[float] | None) -> str:
    return f"[{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""


def print_runs(folder: Path) -> None:
    """Print a line for each run in a folder.

    Raises:
        TandemError: there is none.
    """
    runs = [load(recipe.parent) for recipe in folder.glob("*/config.yaml")]
    if not runs:
        raise TandemError(f"there is no run in {folder}; tandem train RECIPE makes one")
    rows = sorted(((summarise(run), run) for run in runs), key=lambda row: (row[0]["started"] or 0.0, row[1].name))
    headings = ("run", "status", "steps", "model", "environment", "lr", "reward", "held out", "time")
    table = Table(*(Column(heading, overflow="fold") for heading in headings), box=None, pad_edge=False)
    for summary, run in rows:
        table.add_row(*map(Text, _row(run.name, summary)))
    Console().print(table)


def _row(name: str, of: Summary) -> Sequence[str]:
    facts = dict(of["facts"])
    steps = f"{of['steps']}/{of['steps_planned'] or '?'}"
    model = Path(facts.get("model", "")).name
    about = (model, facts.get("environment", ""), facts.get("learning rate", ""))
    reward = _shown((of["reward_first"], of["reward_last"]))
    held_out = _shown(each["mean"] for each in (of["before"], of["after"]) if each is not None)
    return (name, of["status"], steps, *about, reward, held_out, duration(of["seconds"]))


def _shown(values: Iterable[float | None]) -> str:
    return " → ".join(f"{value:.3g}" for value in values if value is not None)
