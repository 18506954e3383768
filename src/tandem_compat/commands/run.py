"""Command lines of Atropos and ms-swift, run as the recipes that they come to; with ``show`` the recipe is the result.

Each takes the values of every flag that was not left out, and options that are laid over the recipe.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tandem.api.blocking import run_to_end
from tandem.cli.train import ended, shown, with_notes
from tandem.config.loading import Loaded, from_options
from tandem_compat import swift
from tandem_compat.atropos import server
from tandem_compat.atropos.rules import read
from tandem_compat.atropos.services import require_broker, running_engine
from tandem_compat.sharding import started_ranks
from tandem_compat.table import Translation


def atropos(values: Mapping[str, Any], overrides: Sequence[str], *, show: bool, unified: bool = False) -> str:
    """Train as the flags say, on an engine that serves at --vllm-port already, or else on one that is started.

    Args:
        values: of the flags.
        overrides: options laid over the recipe.
        show: return the recipe as YAML.
        unified: as atropos-grpo-run: one copy of the weights, an engine of its own, and times at the end.

    Raises:
        ConfigError: a flag is wrong, or asks for what cannot be had.
        BrokerError: there is no broker.
    """
    flags = read({**({"weight-bridge-mode": ["shared_vllm"], "benchmark": True} if unified else {}), **values})
    running = None if unified else running_engine(flags, os.environ)
    translation, source = flags.translation(os.environ, running), Path("tandem atropos-grpo")
    if show:
        return _written(translation, overrides, source)
    folder = _trained(translation, overrides, source)
    text = f"{ended(folder)}; checkpoints: {flags['save-path']}"
    return f"{text}\n\n{benchmark(folder)}" if flags["benchmark"] else text


def atropos_server(values: Mapping[str, Any], words: Sequence[str], *, show: bool) -> None:
    """Run the engine alone until Ctrl-C; ``words`` are options laid over the recipe, and others of vLLM's server.

    Raises:
        ConfigError: a flag is wrong, or asks for what cannot be had.
        EngineError: the engine did not start, or it died.
    """
    rest, overrides = server.divided(words)
    _serve(server.translate(values, rest, os.environ), overrides, Path("tandem atropos-server"), show=show)


def swift_rlhf(arguments: Mapping[str, Sequence[str]], overrides: Sequence[str], *, show: bool) -> str:
    """Train as the arguments say.

    Raises:
        ConfigError: an argument is wrong or would change nothing.
        EnvError: the data cannot be read.
    """
    source = Path("tandem swift rlhf")
    if not show:
        start_ranks(os.environ)
    translation = swift.rlhf(arguments, os.environ)
    return _written(translation, overrides, source) if show else ended(_trained(translation, overrides, source))


def swift_deploy(arguments: Mapping[str, Sequence[str]], overrides: Sequence[str], *, show: bool) -> None:
    """Run the engine alone until Ctrl-C; raises as ``atropos_server``."""
    _serve(swift.deploy(arguments), overrides, Path("tandem swift deploy"), show=show)


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


def benchmark(folder: Path) -> str:
    """Mean times of a step and its parts, peak memory and the whole time, from what the run wrote down."""
    from tandem.observability.report.folder import load
    from tandem.observability.report.summary import column, summarise

    run = load(folder)
    rows = [("steps", str(len(run.metrics)))]
    for label, metric in (("mean step", "seconds/step"), ("mean sync", "seconds/sync"), ("mean fetch", "seconds/wait")):
        values = column(run, metric)
        rows.append((label, f"{statistics.fmean(values):.3f} s" if values else "not measured"))
    for metric in sorted({name for row in run.metrics for name in row["metrics"] if name.startswith("memory/")}):
        rows.append((f"peak {metric}", f"{max(column(run, metric)):.2f} GB"))
    rows.append(("total", f"{summarise(run)['seconds']:.1f} s"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _written(translation: Translation, overrides: Sequence[str], source: Path) -> str:
    """The recipe as YAML that ``tandem train`` takes; mistakes in overrides are said to be in ``source``."""
    return shown(from_options(translation.options, overrides, source), translation.notes)


def _loaded(translation: Translation, overrides: Sequence[str], source: Path) -> Loaded:
    """The recipe, checked; its notes are printed, and its environment variables set."""
    for note in translation.notes:
        typer.echo(f"tandem: {note}", err=True)
    os.environ.update(translation.environ)
    return from_options(translation.options, overrides, source)


def _trained(translation: Translation, overrides: Sequence[str], source: Path) -> Path:
    """Train as the recipe says; the run's folder."""
    config = _loaded(translation, overrides, source).config
    if config.broker is not None:
        require_broker(config.broker.url)
    from tandem.trainer import assemble  # only now: a mistake is told before the rest has loaded

    return run_to_end(assemble.train(config, resume=None))


def _serve(translation: Translation, overrides: Sequence[str], source: Path, *, show: bool) -> None:
    """Run the recipe's engine alone until Ctrl-C."""
    if show:
        typer.echo(with_notes(from_options(translation.options, overrides, source).written, translation.notes))
        return
    config = _loaded(translation, overrides, source).config
    from tandem.cli.serve import serve_engine  # only now: a mistake is told before the rest has loaded

    serve_engine(config, typer.echo)
