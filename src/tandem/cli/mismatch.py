"""``tandem mismatch``: why the trainer's logprobs of a run's tokens are not the engine's."""

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


def mismatch(run: Path, *, step: int | None, tokens: int, as_json: bool) -> None:
    """Print what the gap is made of.

    Args:
        run: the run's folder.
        step: optimizer step to look at; None: one whose weights are on disk.
        tokens: about how many of its tokens.
        as_json: print JSON alone.

    Raises:
        ConfigError: it is not a run's folder, or its model cannot be read.
        TandemError: there is nothing to look at.
    """
    gap = look(run, load(recipe_of(run)).config, step=step, tokens=tokens)
    if as_json:
        typer.echo(json.dumps(gap.as_json(), indent=2))
    else:
        _show(gap, Console())


def _show(mismatch: Mismatch, console: Console) -> None:
    _print_headline(console, mismatch)
    _print_parts(console, mismatch)
    _print_positions(console, mismatch)
    if mismatch.dominant is not None:
        _print_worst(console, mismatch)
    _print_breaks(console, mismatch)
    style = "green" if mismatch.dominant is None else "bold" if mismatch.dominant.fault else ""
    console.print()
    console.print(Text(mismatch.verdict, style))


def _print_headline(console: Console, mismatch: Mismatch) -> None:
    """What was looked at, and how large the gap is."""
    gap = mismatch.gap
    sampled = ", ".join(f"{version} ({count})" for version, count in mismatch.versions.items())
    lines = [
        f"step {mismatch.step}: {mismatch.tokens} tokens of {mismatch.rollouts} rollouts, by version {sampled}; "
        f"{mismatch.dtype} on {mismatch.device}",
        f"trainer minus engine, nats: mean {gap['mean']:+.2g}, rms {gap['rms']:.2g}, widest {gap['max']:.2g}; "
        f"KL {gap['k3']:.2g}; rms that {mismatch.dtype} explains: {mismatch.allowed:.2g}",
    ]
    if mismatch.passed:
        lines.append(f"{mismatch.passed} rollouts have no gap: not trained, or no logprobs of their sampler")
    for version, other in mismatch.stand_ins.items():
        lines.append(f"version {version} is not on disk; suppositions are computed with version {other}")
    if mismatch.probe_gap is not None:
        lines.append(f"proofs after the publishes before it: at most {mismatch.probe_gap:.2g} nats on a probe")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _print_parts(console: Console, mismatch: Mismatch) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("share", "95 %", "mean", "rms", "kind", "cause"):
        table.add_column(column, justify="left" if column in ("kind", "cause") else "right")
    for part in mismatch.parts:
        table.add_row(
            f"{part.share:.1%}",
            "" if part.interval is None else f"{part.interval[0]:.0%} to {part.interval[1]:.0%}",
            f"{part.mean:+.1e}",
            f"{part.rms:.1e}",
            part.category,
            Text(part.name),
        )
    console.print()
    console.print(table)


def _print_positions(console: Console, mismatch: Mismatch) -> None:
    kinds = sorted(mismatch.categories, key=lambda kind: -mismatch.categories[kind])
    table = Table(box=None, pad_edge=False)
    table.add_column("place in turn")
    for column in ("tokens", "mean", "rms", *kinds):
        table.add_column(column, justify="right")
    for place in mismatch.positions:
        shares = (f"{place.shares[kind]:.0%}" for kind in kinds)
        table.add_row(place.where, str(place.tokens), f"{place.mean:+.1e}", f"{place.rms:.1e}", *shares)
    console.print()
    console.print(table)


def _print_worst(console: Console, mismatch: Mismatch) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("engine", "trainer", "mostly", "token"):
        table.add_column(column, justify="left" if column in ("mostly", "token") else "right")
    for token in mismatch.worst:
        kind = max(token.parts, key=lambda kind: abs(token.parts[kind]))
        text = Text.assemble((_plain(token.context), "dim"), (_plain(token.text), "reverse"))
        table.add_row(f"{token.engine:.3f}", f"{token.trainer:.3f}", kind, text)
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
