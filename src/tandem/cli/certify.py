"""``tandem certify``: a recipe's objective, proven on made-up groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.loading import load
from tandem.tools.certify.case import certify
from tandem.tools.certify.certificate import Certificate

_STYLES = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


def print_certificate(recipe: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print the certificate; returns 0 if it passes, else 1.

    Args:
        recipe: what is certified.
        overrides: laid over it.
        as_json: print JSON alone.

    Raises:
        ConfigError: the recipe is wrong, or its model cannot be read.
    """
    certificate = certify(load(recipe, overrides).config)
    if as_json:
        # Strict JSON: a distance that is not a number or infinite is null.
        typer.echo(msgspec.json.format(msgspec.json.encode(certificate.as_json()), indent=2))
    else:
        _show(certificate, Console())
    return 0 if certificate.passed else 1


def _show(certificate: Certificate, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "what was compared", "apart", "allowed", "with what"):
        table.add_column(column, justify="right" if column in ("apart", "allowed") else "left")
    for line in certificate.lines:
        figures = ["" if value is None else f"{value:.1e}" if value else "0" for value in (line.figure, line.bound)]
        note = "; ".join(text for text in (line.compared_with, line.note) if text)
        table.add_row(Text(line.state, _STYLES[line.state]), line.name, *figures, Text(note))
    console.print(certificate.model, markup=False, highlight=False)
    console.print(table)
    failed = sum(line.state == "fail" for line in certificate.lines)
    verdict = f"{failed} failed" if failed else "passed"
    console.print(f"{verdict} in {certificate.seconds:.0f} s", style="bold red" if failed else "green", highlight=False)
