"""torch's compiler: whether this machine has all that it needs, and how it is called."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch._functorch import config as _autograd

from tandem.errors import ConfigError

log = logging.getLogger(__name__)

Compile = bool | Literal["auto"]
"""auto: on CUDA, where the machine can."""


def compiled(forward: Callable[..., Any], backend: str, checkpointing: str) -> Callable[..., Any]:
    """A function compiled for any number of tokens.

    The compiler keeps what it must not compute twice (products) and what is cheap to keep. With checkpointing:
    selective it also computes again what a product of the backward pass reads, such as the gated activation.
    """
    chosen = _keeping_less(backend) if checkpointing == "selective" else backend
    fast: Callable[..., Any] = torch.compile(forward, dynamic=True, backend=chosen)
    return fast


@cache
def forgiving(backend: str, part: str) -> Callable[..., Any]:
    """The compiler with code of its own for each ``part``; a graph that it cannot build runs as it is, with a warning.

    Triton fails to build some kernels on some cards ("PassManager::run failed"), for sizes that may first come late.
    """
    make: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

    def compile_or_run(graph: Any, inputs: Any, **options: Any) -> Any:
        try:
            return make(graph, inputs, **options)
        except Exception as error:
            log.warning("%s cannot be compiled and runs uncompiled, slower: %s", part, str(error).strip()[-200:])
            return graph.forward

    return compile_or_run


@cache  # by its identity the compiler tells whose code it has
def _keeping_less(backend: str) -> Callable[..., Any]:
    make: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

    def keeping_less(graph: Any, inputs: Any, **options: Any) -> Any:
        with _autograd.patch(ban_recompute_materialized_backward=False):
            return make(graph, inputs, **options)

    return keeping_less


@cache  # so that what is lacking is said once
def decide(wanted: Compile, device: torch.device) -> bool:
    """True if the model is to be compiled for ``device``; logs once why not, where auto would and cannot.

    Raises:
        ConfigError: compile: true, and the machine cannot.
    """
    if wanted is False or (wanted == "auto" and device.type != "cuda"):
        return False
    lacks = missing(device)
    if lacks is None:
        return True
    if wanted is True:
        raise ConfigError(f"compile: true needs {lacks}; install it, or set compile: auto")
    log.warning("the model's layers are not compiled, and a step takes about a fifth longer: there is no %s", lacks)
    return False


def missing(device: torch.device) -> str | None:
    """What torch's compiler needs for ``device`` and does not find here; None if it has everything."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton (pip install triton)"
    # On CUDA triton compiles its launchers in C, on a CPU the layers themselves become C++.
    variable, known = ("CC", ("gcc", "clang", "cc")) if device.type == "cuda" else ("CXX", ("g++", "clang++", "c++"))
    named = os.environ.get(variable)
    if not any(map(shutil.which, [named] if named else known)):
        return (
            f"compiler {named!r}, which {variable} names"
            if named
            else f"C compiler ({', '.join(known)}, or {variable})"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"Python header {header} (python3-dev)"
