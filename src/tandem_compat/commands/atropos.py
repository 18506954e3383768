"""``tandem atropos-grpo`` and ``atropos-server``: the command lines of Atropos' example trainer and of its engine."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.cli.train import ended
from tandem_compat.atropos.rules import read
from tandem_compat.atropos.server import divided
from tandem_compat.atropos.server import translate as translate_server
from tandem_compat.atropos.services import running_engine
from tandem_compat.commands.translated import serve, train, written

SOURCE = Path("tandem atropos-grpo")
"""What mistakes in the recipe are said to be in."""


def atropos(values: Mapping[str, Any], overrides: Sequence[str], *, show: bool, unified: bool = False) -> str:
    """Train as the flags say, or with ``show`` only write down how; returns the message to print.

    An engine that serves at --vllm-port already is used; else one is started.

    Args:
        values: the flags that were not left out.
        overrides: options laid over the recipe.
        show: return the recipe as YAML.
        unified: as atropos-grpo-run: one copy of the weights, an engine of its own, and times at the end.

    Raises:
        ConfigError: a flag is wrong, or asks for what cannot be had.
        BrokerError: there is no broker.
    """
    flags = read({**({"weight-bridge-mode": ["shared_vllm"], "benchmark": True} if unified else {}), **values})
    running = None if unified else running_engine(flags, os.environ)
    translation = flags.translation(os.environ, running)
    if show:
        return written(translation, overrides, SOURCE)
    folder = train(translation, overrides, SOURCE)
    text = f"{ended(folder)}; checkpoints: {flags['save-path']}"
    return f"{text}\n\n{benchmark(folder)}" if flags["benchmark"] else text


def server(values: Mapping[str, Any], words: Sequence[str], *, show: bool) -> None:
    """Run the engine alone until Ctrl-C, or with ``show`` only write down which.

    Args:
        values: the flags that were not left out.
        words: options laid over the recipe, and other options of vLLM's server.
        show: print the recipe as YAML.

    Raises:
        ConfigError: a flag is wrong, or asks for what cannot be had.
        EngineError: the engine did not start, or it died.
    """
    rest, overrides = divided(words)
    serve(translate_server(values, rest, os.environ), overrides, Path("tandem atropos-server"), show=show)


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
