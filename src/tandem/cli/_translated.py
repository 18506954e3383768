"""Command lines of other systems as the recipes that they come to: printed, or loaded to be run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tandem.config.loading import Loaded, from_options
from tandem.config.tree import render
from tandem.types import Json

if TYPE_CHECKING:
    from tandem.compat.table import Translation  # which a recipe of Tandem's own need not load


def with_notes(options: Json, notes: Iterable[str]) -> str:
    """A recipe in YAML, with notes as comments."""
    return "".join(f"# {note}\n" for note in notes) + render(options).rstrip()


def written(translation: Translation, overrides: Sequence[str], source: Path) -> str:
    """The recipe as YAML that ``tandem train`` takes.

    Args:
        translation: of the command line.
        overrides: laid over it.
        source: what mistakes in them are said to be in.

    Raises:
        ConfigError: an option or an override is wrong.
    """
    return shown(from_options(translation.options, overrides, source), translation.notes)


def shown(loaded: Loaded, notes: Iterable[str]) -> str:
    """A recipe in YAML, with notes as comments.

    Raises:
        UnsupportedPair: its options cannot be had together, as ``tandem check`` says.
        ConfigError: this machine lacks what an option needs.
    """
    from tandem.trainer import memory_plan, pairs  # which need torch
    from tandem.trainer.ranks import checks

    pairs.check_pairs(loaded.config)
    checks.check_division(loaded.config, memory_plan.RankCounts.of(loaded.config).world)
    return with_notes(loaded.options, notes)


def loaded(translation: Translation, overrides: Sequence[str], source: Path) -> Loaded:
    """The recipe, checked; its notes are printed, and its environment variables set. Otherwise as ``written``."""
    for note in translation.notes:
        typer.echo(f"tandem: {note}", err=True)
    os.environ.update(translation.environ)
    return from_options(translation.options, overrides, source)


def serve(translation: Translation, overrides: Sequence[str], source: Path, *, show: bool) -> None:
    """Run the recipe's engine alone until Ctrl-C, or with ``show`` only print the recipe.

    Raises:
        ConfigError: an option or an override is wrong.
        EngineError: the engine did not start, or it died.
    """
    if show:
        typer.echo(with_notes(from_options(translation.options, overrides, source).options, translation.notes))
        return
    config = loaded(translation, overrides, source).config
    from tandem.cli.serve import serve_engine  # only now: a mistake is told before the rest has loaded

    serve_engine(config, typer.echo)
