"""``tandem train``: start a run by its recipe, or resume one by its folder."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from tandem.config.loading import RESUMABLE, RESUMABLE_SYNC, RunConfig, from_options, load
from tandem.config.tree import render
from tandem.errors import ConfigError, TandemError
from tandem.trainer import digests
from tandem.types import Json

T = TypeVar("T")


class Interrupted(TandemError):
    """Ctrl-C; the message says what was saved and how to go on."""

    exit_code = 130


def train(target: Path, overrides: Sequence[str], *, show: bool) -> str:
    """Train until done, or with ``show`` only write down how; returns what to tell."""
    if show:
        return written(recipe_of(target) if target.is_dir() else target, overrides)
    if target.is_dir():
        config, resume, given = resumed(target, overrides), target, frozenset[str]()
    else:
        loaded = load(target, overrides)
        for note in loaded.notes:
            typer.echo(f"tandem: {note}", err=True)
        config, resume, given = loaded.config, None, frozenset(loaded.given)
    from tandem.trainer import assemble as run  # only now: a mistake in the recipe is told before the rest has loaded

    folder = finish(run.train(config, resume=resume, given=given))
    return ended(folder)


def ended(folder: Path) -> str:
    """What is told of a run that is done: where it is, and its report."""
    return f"done: {folder} (tandem show {folder}); report: {folder / 'report.html'}"


def written(source: Path, overrides: Sequence[str]) -> str:
    """What a file says as a recipe in YAML, notes as comments.

    Raises:
        ConfigError: as ``load``.
    """
    loaded = load(source, overrides)
    return "".join(f"# {note}\n" for note in loaded.notes) + render(loaded.options).rstrip()


def translated(options: Json, notes: Sequence[str], overrides: Sequence[str], source: Path) -> str:
    """The recipe that a command line of another system comes to, as YAML that ``tandem train`` takes.

    Args:
        options: the recipe.
        notes: written as comments.
        overrides: laid over it.
        source: what mistakes in them are said to be in.

    Raises:
        ConfigError: an option or an override is wrong, as for ``load``.
    """
    loaded = from_options(options, overrides, source)
    return "".join(f"# {note}\n" for note in notes) + render(loaded.options).rstrip()


def resumed(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run that goes on.

    Raises:
        ConfigError: the folder is not a run's, or an override would make it another run.
    """
    recipe = recipe_of(folder)
    within = {f"sync.{name}" for name in RESUMABLE_SYNC}
    for given in overrides:
        name = given.partition("=")[0]
        option = name.partition(".")[0]
        if option not in RESUMABLE and name not in within:
            raise ConfigError(
                f"command line: {given}: a resumed run keeps its {option!r}, for it would be another run; "
                f"these may change: {', '.join(sorted(RESUMABLE | within))} (to change more, start a new run from "
                f"{recipe})"
            )
    config = load(recipe, overrides).config
    if config.checkpoint.save != "all":
        raise ConfigError(
            f"{folder} saves {config.checkpoint.save} (checkpoint: {config.checkpoint.save}): it cannot be gone on "
            f"with; start a run anew from {recipe}"
        )
    newest = max(digests.steps_in(folder / "checkpoints"), default=0)
    if config.steps < newest and any(given.partition("=")[0] == "steps" for given in overrides):
        raise ConfigError(
            f"command line: steps={config.steps}: {folder} is at step {newest} already, and steps are those of the "
            f"whole run: name at least {newest}, or take an earlier checkpoint out of it with tandem export --step"
        )
    if config.optimizer.schedule != "constant" and any(o.partition("=")[0] == "steps" for o in overrides):
        raise ConfigError(
            f"command line: steps: the {config.optimizer.schedule} schedule of this run ends at its last step, so "
            f"another number of steps is another run; start one from {recipe}"
        )
    return config


def recipe_of(folder: Path) -> Path:
    """The recipe that a run's folder holds.

    Raises:
        ConfigError: it is not a run's folder.
    """
    recipe = folder / "config.yaml"
    if recipe.is_file():
        return recipe
    if not folder.exists():
        raise ConfigError(f"there is no run {folder}{_runs_nearby(folder)}")
    raise ConfigError(f"{folder} is not a run's folder: it has no config.yaml{_runs_nearby(folder)}")


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end; Ctrl-C becomes an error with its message and exit code.

    Raises:
        Interrupted: the user pressed Ctrl-C.
    """
    try:
        return asyncio.run(coroutine)
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or "interrupted") from error


def _runs_nearby(folder: Path) -> str:
    """Run folders beside or inside what was given."""
    places = (folder, folder.parent, Path("runs"))
    found = {str(config.parent): None for place in places for config in sorted(place.glob("*/config.yaml"))}
    return f"; runs: {', '.join(list(found)[-8:])}" if found else ""
