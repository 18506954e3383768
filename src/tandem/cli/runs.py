"""``tandem runs`` and ``tandem recipes``: what was trained, and what there is to train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem import clone
from tandem.errors import TandemError
from tandem.observability.board import duration
from tandem.observability.report.folder import load
from tandem.observability.report.summary import Summary, summarise


def print_runs(folder: Path) -> None:
    """Print a line for each run in a folder.

    Raises:
        TandemError: there is none.
    """
    runs = [load(recipe.parent) for recipe in folder.glob("*/config.yaml")]
    if not runs:
        raise TandemError(f"there is no run in {folder}; tandem train RECIPE makes one")
    rows = sorted(((summarise(run), run) for run in runs), key=lambda row: (row[0]["started"] or 0.0, row[1].name))
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "status", "steps", "model", "environment", "lr", "reward", "held out", "time"):
        table.add_column(heading, overflow="fold")
    for summary, run in rows:
        table.add_row(*map(Text, _row(run.name, summary)))
    Console().print(table)


def print_recipes() -> None:
    """Print the recipes that ship."""
    console = Console(highlight=False)
    for name, path in clone.recipes().items():
        text = path.read_text(encoding="utf-8")
        comment = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
        card = next((line.removeprefix("Card: ") for line in comment if line.startswith("Card: ")), "")
        model = Path(yaml.safe_load(text)["model"]).name
        about = shorten(" ".join(comment).partition(". ")[0], 76, placeholder=" …")
        console.print(Text.assemble((f"{name:13}", "bold"), f"{model}  {card}\n", (f"  {about}", "dim")))
    console.print("tandem train NAME trains one; tandem new recipe MINE NAME copies one to be edited")


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
