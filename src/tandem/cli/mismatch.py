"""``tandem mismatch``: how far the trainer's logprobs of a run's tokens are from the engine's."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.api.targets import recipe_of
from tandem.config.loading import load
from tandem.tools.mismatch.look import Mismatch, look

_SHOWN = 3
"""Breaks that are shown; the others are counted."""


def mismatch(run: Path, *, step: int | None, as_json: bool) -> None:
    """Print how large the gap is and where.

    Args:
        run: the run's folder.
        step: optimizer step to look at; None: the last recorded.
        as_json: print JSON alone.

    Raises:
        ConfigError: it is not a run's folder, or its tokenizer cannot be read.
        TandemError: there is nothing to look at.
    """
    gap = look(run, load(recipe_of(run)).config, step=step)
    if as_json:
        typer.echo(json.dumps(gap.as_json(), indent=2))
    else:
        _show(gap, Console())


def _show(mismatch: Mismatch, console: Console) -> None:
    gap = mismatch.gap
    lines = [
        f"step {mismatch.step}, which trained version {mismatch.step - 1}: "
        f"{mismatch.rollouts} rollouts, {mismatch.dtype}",
        f"trainer minus engine, nats: mean {gap['mean']:+.2g}, rms {gap['rms']:.2g}, widest {gap['max']:.2g}; "
        f"KL {gap['k3']:.2g}",
    ]
    if mismatch.passed:
        lines.append(f"{mismatch.passed} rollouts have no gap: not trained, or no logprobs of their sampler")
    if mismatch.probe_gap is not None:
        lines.append(f"proofs after the publishes before it: at most {mismatch.probe_gap:.2g} nats on a probe")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    _print_table(console, mismatch)
    _print_worst(console, mismatch)
    _print_breaks(console, mismatch)


def _print_table(console: Console, mismatch: Mismatch) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("version", "place in turn", "tokens", "mean", "rms", "widest"):
        table.add_column(column, justify="left" if column == "place in turn" else "right")
    before: int | str | None = ""
    for cell in mismatch.table:
        version = "" if cell.version == before else "any" if cell.version is None else str(cell.version)
        before = cell.version
        figures = (f"{cell.mean:+.1e}", f"{cell.rms:.1e}", f"{cell.max:.1e}")
        table.add_row(version, cell.where, str(cell.tokens), *figures)
    console.print()
    console.print(table)


def _print_worst(console: Console, mismatch: Mismatch) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("engine", "trainer", "version", "token"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for token in mismatch.worst:
        text = Text.assemble((_plain(token.context), "dim"), (_plain(token.text), "reverse"))
        table.add_row(f"{token.engine:.3f}", f"{token.trainer:.3f}", str(token.version), text)
    console.print()
    console.print(table)


def _print_breaks(console: Console, mismatch: Mismatch) -> None:
    if not mismatch.breaks:
        return
    what = {
        "opening": "the first prompt is not what the template makes of its messages",
        "history": "the prompt does not continue what was sampled",
        "reply": "what lies between two turns is not what the template makes of it",
    }
    console.print()
    for broken in mismatch.breaks[:_SHOWN]:
        console.print(
            f"{broken.rollout}, turn {broken.turn + 1}: {what[broken.kind]}, first at token {broken.at}: "
            f"expected {_quoted(broken.expected)}, recorded {_quoted(broken.recorded)}",
            markup=False, highlight=False,
        )  # fmt: skip
    if len(mismatch.breaks) > _SHOWN:
        console.print(f"and {len(mismatch.breaks) - _SHOWN} more turns", markup=False, highlight=False)


def _quoted(pieces: tuple[str, ...]) -> str:
    return " ".join(repr(piece) for piece in pieces) or "nothing"


def _plain(text: str) -> str:
    return repr(text)[1:-1]
