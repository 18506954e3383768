"""``tandem train``: start a run by its recipe, or resume one by its folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from tandem import machine
from tandem.api.blocking import run_to_end
from tandem.api.targets import recipe_of, resumed
from tandem.config.loading import Loaded, load
from tandem.config.tree import render
from tandem.errors import command
from tandem.types import Json


def train(target: Path, overrides: Sequence[str], *, show: bool, launcher: str | None = None) -> str:
    """Train until done, or with ``show`` only write down how; returns the message to print.

    Args:
        target: a recipe, or the folder of a run.
        overrides: laid over it.
        show: return the recipe as YAML.
        launcher: ``ray`` to run the same command line on every rank of a Ray cluster.
    """
    if show:
        loaded = load(recipe_of(target) if target.is_dir() else target, overrides)
        return shown(loaded, loaded.notes)
    if target.is_dir():
        config, resume = resumed(target, overrides), target
    else:
        loaded = load(target, overrides)
        for note in loaded.notes:
            typer.echo(f"tandem: {note}", err=True)
        config, resume = loaded.config, None
    if launcher == "ray":
        from tandem.distributed.ray_cluster import launch

        launch(["train", str(target), *overrides], config.ranks if isinstance(config.ranks, int) else None)
        return "done, on Ray: the lead's last line says where"
    with machine.importing():  # only now: a mistake in the recipe is told before the rest has loaded
        from tandem.trainer import assemble as run

    return ended(run_to_end(run.train(config, resume=resume)))


def supervised(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """Overrides by which all steps of a recipe are a warm start; where it has epochs, as many steps as they are.

    Raises:
        ConfigError: a mistake in the recipe.
        EnvError: its data cannot be read.
    """
    others = [override for override in overrides if not override.startswith("warm_start.steps=")]
    overrides = [*others, "warm_start.steps=null"]
    config = load(recipe, overrides).config
    if config.warm_start is None or config.warm_start.epochs is None:
        return overrides
    from tandem.trainer import environments

    kept = [each for each in overrides if not each.startswith(("steps=", "warm_start.epochs="))]
    return [*kept, f"steps={environments.warm_steps(config)}", "warm_start.epochs=null"]


def ended(folder: Path) -> str:
    """Message about a finished run: its folder and its report."""
    return f"done: {folder} ({command('show', folder)}); report: {folder / 'report.html'}"


def shown(loaded: Loaded, notes: Iterable[str]) -> str:
    """A recipe in YAML, with notes as comments.

    Raises:
        UnsupportedPair: its options cannot be had together, as ``tandem check`` and a run say.
        ConfigError: this machine lacks what an option needs.
    """
    from tandem.trainer.ranks import layout  # which need torch

    layout.check_config(config := layout.placed(loaded.config))
    divided = () if config is loaded.config else (layout.described(config),)
    return with_notes(loaded.written, (*notes, *divided))


def with_notes(options: Json, notes: Iterable[str]) -> str:
    """A recipe in YAML, with notes as comments."""
    return "".join(f"# {note}\n" for note in notes) + render(options).rstrip()
