"""Targets of ``resume`` and ``evaluate``: the folder of a run, a recipe or a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from tandem.config.loading import ENGINE_KEEPS, RESUMABLE, RunConfig, digest, from_options, load
from tandem.errors import REDACTED, CheckpointError, ConfigError
from tandem.trainer import run_folder, state

log = logging.getLogger(__name__)


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


def resumed(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run that goes on.

    Raises:
        ConfigError: the folder is not a run's, or an override would make it another run.
    """
    recipe = recipe_of(folder)
    begun, loaded = digest(load(recipe, []).config), load(recipe, overrides)
    config = loaded.config
    fixed = [o for o in overrides if _option(o) not in RESUMABLE]
    if digest(config) != begun or any(_option(o) in ("runs", "name") for o in fixed):
        free = [o for o in fixed if _option(o) in ("sync", "engine") and digest(load(recipe, [o]).config) == begun]
        culprit = next((o for o in fixed if o not in free), overrides[-1])
        raise ConfigError(
            f"command line: {culprit}: a resumed run keeps its {_option(culprit)!r}, for it would be another run; "
            f"these may change: {', '.join(sorted(RESUMABLE))}, how weights travel (sync, but for sync.every) and "
            f"where engines run (engine, but for {', '.join(sorted(ENGINE_KEEPS))}). To change more, start a new run "
            f"from {recipe}"
        )
    if without := re.search(rf"\w+://[^\s/]*:{re.escape(REDACTED)}@[^\s']*", str(loaded.written)):
        raise ConfigError(
            f"{recipe} does not hold the password of {without.group()}; give that option anew, as name=URL with the "
            "password in it"
        )
    if config.checkpoint.save != "all":
        raise ConfigError(
            f"{folder} saves {config.checkpoint.save} (checkpoint: {config.checkpoint.save}): it cannot be gone on "
            f"with; start a run anew from {recipe}"
        )
    if config.optimizer.schedule != "constant" and any(_option(o) == "steps" for o in overrides):
        raise ConfigError(
            f"command line: steps: the {config.optimizer.schedule} schedule of this run ends at its last step, so "
            f"another number of steps is another run; start one from {recipe}"
        )
    return config


def _option(override: str) -> str:
    """The top-level option that an override sets."""
    return override.partition("=")[0].partition(".")[0]


def weights_of(run: Path, step: int | None) -> Path:
    """The model or adapter folder of a checkpoint, by default of the newest. The recipe is not read.

    Raises:
        CheckpointError: there is none.
    """
    steps = state.checkpoints_in(run / "checkpoints")
    if not steps:
        raise CheckpointError(f"{run} has no checkpoint yet; one is written every checkpoint.every steps")
    if step is not None and step not in steps:
        available = ", ".join(str(number) for number in sorted(steps))
        raise CheckpointError(f"{run} has no checkpoint of step {step}; it has: {available}")
    checkpoint = steps[max(steps) if step is None else step]
    for name in ("model", "adapter"):
        if (checkpoint / name).is_dir():
            return checkpoint / name
    raise CheckpointError(
        f"{checkpoint} has neither model nor adapter; the checkpoint is damaged, choose another with --step"
    )


def to_evaluate(target: Path, overrides: Sequence[str], step: int | None) -> tuple[RunConfig, Path | None]:
    """The configuration of an evaluation, and the trained weights where they are not the configuration's model.

    Args:
        target: a run's folder, a recipe's file or a model's folder.
        overrides: laid over the recipe; a model needs at least an environment.
        step: the checkpoint of a run; None: the newest.

    Raises:
        ConfigError: the target is none of the three, or there is nothing to evaluate on.
        CheckpointError: the run has no such checkpoint.
    """
    weights = None
    if (target / "config.yaml").is_file():
        config, weights = load(target / "config.yaml", overrides).config, weights_of(target, step)
        for line in run_folder.code_changes(config, target):
            log.warning("%s: this measures with the code as it is now", line)
    elif step is not None:
        raise ConfigError(f"step names a checkpoint of a run, and {target} is not a run's folder; leave it out")
    elif (target / "config.json").is_file():
        if not any(_option(override) in ("env", "envs") for override in overrides):
            raise ConfigError(f"{target} is a model and says nothing of tasks; name an environment, such as env=gsm8k")
        config = from_options({"model": str(target), "steps": 1}, overrides, target).config
    else:
        config = load(target, overrides).config
    check_evaluated(config, str(target))
    return config, weights


def check_evaluated(config: RunConfig, target: str) -> None:
    """See that there are tasks to evaluate on.

    Raises:
        ConfigError: there are none.
    """
    if not config.sources:
        raise ConfigError(f"{target} trains on a broker's groups and has no tasks of its own; name some: env=gsm8k")
    if not config.evaluate.tasks:
        raise ConfigError("evaluate.tasks is 0, so there is nothing to evaluate; add evaluate.tasks=40")


def _runs_nearby(folder: Path) -> str:
    """Run folders beside or inside what was given."""
    places = (folder, folder.parent, Path("runs"))
    runs = {str(config.parent): None for place in places for config in sorted(place.glob("*/config.yaml"))}
    return f"; runs: {', '.join(list(runs)[-8:])}" if runs else ""
