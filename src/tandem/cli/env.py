"""``tandem env NAME serve``: an environment by the flags that Atropos' environments take."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tandem.cli._work_recipe import from_options
from tandem.cli.work import play
from tandem.compat.atropos.environment import EnvFlags, from_file, named, translate
from tandem.compat.atropos.services import served_model
from tandem.errors import ConfigError

ELSEWHERE = {
    "evaluate": "held-out tasks are evaluated by: tandem eval RECIPE",
    "process": "rollouts without a broker are not written; tandem check RECIPE looks at an environment",
}
"""Other modes of Atropos' environments, and where theirs is done."""


def env(name: str, mode: str, given: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Play as the flags say; returns what to tell.

    Args:
        name: the environment.
        mode: serve.
        given: the flags that were not left out.
        overrides: options of ``tandem work`` laid over them.

    Raises:
        ConfigError: a flag is wrong, or the mode is another.
        EngineError: no flag says which model it is, and no engine answers that could.
    """
    if mode != "serve":
        raise ConfigError(f"tandem env {name} {mode}: {ELSEWHERE.get(mode, 'there is no such mode; it is serve')}")
    if "config" in given:
        given = {**from_file(Path(given["config"])), **given}
    flags = EnvFlags(**given)
    if not named(flags):
        flags = dataclasses.replace(flags, tokenizer_name=served_model(flags.base_url.partition(",")[0], flags.api_key))
        typer.echo(f"tandem: --env.tokenizer_name: that of {flags.tokenizer_name}, which the engine serves", err=True)
    translated = translate(name, flags, frozenset(given))
    for note in translated.notes:
        typer.echo(f"tandem: {note}", err=True)
    os.environ.update(translated.environ)
    return play(from_options(translated.options, overrides, f"tandem env {name}"))
