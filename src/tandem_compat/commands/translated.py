"""Command lines of other systems as the recipes that they come to: printed, or loaded to be run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from tandem.api.blocking import run_to_end
from tandem.cli.train import shown, with_notes
from tandem.config.loading import Loaded, from_options
from tandem_compat.atropos.services import require_broker
from tandem_compat.table import Translation


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


def loaded(translation: Translation, overrides: Sequence[str], source: Path) -> Loaded:
    """The recipe, checked; its notes are printed, and its environment variables set. Otherwise as ``written``."""
    for note in translation.notes:
        typer.echo(f"tandem: {note}", err=True)
    os.environ.update(translation.environ)
    return from_options(translation.options, overrides, source)


def train(translation: Translation, overrides: Sequence[str], source: Path) -> Path:
    """Train as the recipe says; returns the run's folder. Otherwise as ``loaded``.

    Raises:
        BrokerError: there is no broker where the recipe has one.
    """
    config = loaded(translation, overrides, source).config
    if config.broker is not None:
        require_broker(config.broker.url)
    from tandem.trainer import assemble  # only now: a mistake is told before the rest has loaded

    return run_to_end(assemble.train(config, resume=None))


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
