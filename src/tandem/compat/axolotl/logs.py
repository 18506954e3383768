"""What an Axolotl file's run tells: answers that are shown, and where numbers go."""

from __future__ import annotations

from tandem.compat.axolotl.draft import Draft
from tandem.types import Json


def put(recipe: Draft, steps: int) -> None:
    """All of it, of a run of so many steps."""
    _shown(recipe, steps)
    _loggers(recipe)


def _shown(recipe: Draft, steps: int) -> None:
    """Answers that are printed, as often as TRL logs."""
    file, shown, count = recipe.file, "trl.log_completions", "trl.num_completions_to_print"
    often: float = file.get("logging_steps", 1)
    every = recipe.every("logging_steps", "", steps)
    if file.get(shown):
        recipe.put("print_completions.every", max(1, every), "logging_steps", shown)
        recipe.put("print_completions.count", file.get(count), count, shown)
        return
    if shown in file:
        recipe.put("print_completions.every", 0, shown)
    if count in file:
        file.note(count, "changes nothing without log_completions: true")
    if often != 1:
        file.note("logging_steps", "changes nothing: every step is logged")


def _loggers(recipe: Draft) -> None:
    """Where numbers go."""
    file = recipe.file
    loggers: list[Json] = ["console"]
    wandb = file.get("use_wandb") or file.get("wandb_project")
    for option in ("wandb_entity", "wandb_mode"):
        if file.get(option) and not wandb:
            file.note(option, "changes nothing without wandb_project or use_wandb: true")
    if wandb and file.get("wandb_mode") != "disabled":
        named = {key: file.get(f"wandb_{key}") for key in ("project", "entity", "mode")}
        loggers.append({"kind": "wandb", **{key: value for key, value in named.items() if value}})
    if file.get("use_tensorboard"):
        loggers.append("tensorboard")
    if file.get("use_trackio"):
        named = {"project": file.get("trackio_project_name"), "space": file.get("trackio_space_id")}
        loggers.append({"kind": "trackio", **{key: value for key, value in named.items() if value}})
    for option in ("trackio_project_name", "trackio_space_id"):
        if option in file and not file.get("use_trackio"):
            file.note(option, "changes nothing without use_trackio: true")
    if len(loggers) > 1:
        recipe.put("loggers", loggers, "wandb_project", "use_wandb", "use_tensorboard", "use_trackio")
