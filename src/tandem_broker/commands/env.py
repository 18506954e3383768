"""``tandem env NAME serve``: an environment by the flags that Atropos' environments take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from tandem.errors import ConfigError
from tandem_broker.commands.recipe import from_options
from tandem_broker.commands.work import play
from tandem_compat.atropos.environment import from_file, tokenizer_of, translate
from tandem_compat.atropos.options import ENVIRONMENT
from tandem_compat.atropos.services import served_model


def env(name: str, mode: str, flags: Mapping[str, Sequence[str]], overrides: Sequence[str]) -> str:
    """Play as the flags say; returns the message to print.

    Args:
        name: the environment.
        mode: serve.
        flags: the words of every flag that was not left out.
        overrides: options of ``tandem work`` laid over them.

    Raises:
        ConfigError: a flag is wrong, or the mode is another.
        EngineError: no flag says which model it is, and no engine answers that could.
    """
    if mode != "serve":
        raise ConfigError(f"tandem env {name} {mode}: the mode is serve; tandem eval and tandem check do the others")
    if "config" in flags:
        flags = {**from_file(Path(flags["config"][-1])), **flags}
    values, source = {flag: words[-1] for flag, words in flags.items()}, f"tandem env {name}"
    if not tokenizer_of(values):
        # Before an engine is waited for: whatever its model is called, the rest must be right.
        from_options(translate(name, {**flags, "env.tokenizer_name": ["unknown"]}).options, overrides, source)
        url = values.get("openai.base_url") or str(ENVIRONMENT["openai.base_url"].default)
        model = served_model(url.partition(",")[0], values.get("openai.api_key", ""))
        flags = {**flags, "env.tokenizer_name": [model]}
        typer.echo(f"tandem: --env.tokenizer_name: that of {model}, which the engine serves", err=True)
    translated = translate(name, flags)
    for note in translated.notes:
        typer.echo(f"tandem: {note}", err=True)
    os.environ.update(translated.environ)
    return play(from_options(translated.options, overrides, source))
