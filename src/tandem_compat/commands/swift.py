"""``tandem swift``: ms-swift's command line, run as the recipe it comes to."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from tandem.cli.train import ended
from tandem.errors import ConfigError
from tandem_compat import swift
from tandem_compat.commands.translated import serve, train, written
from tandem_compat.sharding import started_ranks


def rlhf(arguments: Mapping[str, Sequence[str]], overrides: Sequence[str], *, show: bool) -> str:
    """Train as the arguments say, or with ``show`` only write down how; returns the message to print.

    Args:
        arguments: the values of every argument that was not left out.
        overrides: options laid over the recipe.
        show: return the recipe as YAML.

    Raises:
        ConfigError: an argument is wrong or would change nothing.
        EnvError: the data cannot be read.
    """
    _no_file(overrides)
    source = Path("tandem swift rlhf")
    if not show:
        start_ranks(os.environ)
    translation = swift.rlhf(arguments, os.environ)
    if show:
        return written(translation, overrides, source)
    return ended(train(translation, overrides, source))


def _no_file(overrides: Sequence[str]) -> None:
    """Refuse a file of arguments, which ms-swift takes in their place; without them all that it says would be missing.

    Raises:
        ConfigError: there is one.
    """
    for word in overrides:
        if "=" not in word and Path(word).suffix in (".yaml", ".yml", ".json"):
            raise ConfigError(f"{word}: files of arguments are not read; write what it says as --name value")


def start_ranks(environ: Mapping[str, str]) -> None:
    """Become torchrun with this host's ranks of the same command line, where NNODES says that there are several hosts.

    As ms-swift does; with one host the run starts its NPROC_PER_NODE ranks itself.
    """
    if environ.get("NNODES", "1").strip() in ("", "1") or started_ranks(environ) is not None:
        return
    names = ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    options = [f"--{name.lower()}={environ[name]}" for name in names if environ.get(name, "").strip()]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tandem", *sys.argv[1:]]
    typer.echo(f"tandem: {shlex.join(command)}", err=True)
    os.execv(command[0], command)


def deploy(arguments: Mapping[str, Sequence[str]], overrides: Sequence[str], *, show: bool) -> None:
    """Run the engine alone until Ctrl-C, or with ``show`` only write down which.

    Raises:
        ConfigError: an argument is wrong or would change nothing.
        EngineError: the engine did not start, or it died.
    """
    _no_file(overrides)
    serve(swift.deploy(arguments), overrides, Path("tandem swift deploy"), show=show)
