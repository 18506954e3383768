"""``tandem mismatch``: how far the trainer's logprobs of a run's tokens are from the engine's."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from tandem.api.targets import recipe_of
from tandem.config.loading import load
from tandem.tools.mismatch import Mismatch, look


def mismatch(run: Path, *, step: int | None, as_json: bool) -> None:
    """Print how large the gap is and where.

    Args:
        run: the run's folder.
        step: optimizer step to look at; None: the last recorded.
        as_json: print JSON alone.

    Raises:
        ConfigError: it is not a run's folder.
        TandemError: there is nothing to look at.
    """
    result = look(run, load(recipe_of(run)).config, step=step)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        _show(result, Console())


def _show(result: Mismatch, console: Console) -> None:
    gap = result.gap
    lines = [
        f"step {result.step}, which trained version {result.step - 1}: {result.rollouts} rollouts, {result.dtype}",
        f"trainer minus engine, nats: mean {gap['mean']:+.2g}, rms {gap['rms']:.2g}, widest {gap['max']:.2g}; "
        f"KL {gap['k3']:.2g}",
    ]
    if result.without_gap:
        lines.append(f"{result.without_gap} rollouts have no gap: not trained, or no logprobs of their sampler")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("version", "place in turn", "tokens", "mean", "rms", "widest"):
        table.add_column(column, justify="left" if column == "place in turn" else "right")
    for cell in result.table:
        version = "any" if cell.version is None else str(cell.version)
        figures = (f"{cell.mean:+.1e}", f"{cell.rms:.1e}", f"{cell.max:.1e}")
        table.add_row(version if cell.where == "all" else "", cell.where, str(cell.tokens), *figures)
    console.print()
    console.print(table)
