"""torch's compiler: whether this machine has all that it needs, and how it is called."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch import config as _autograd

from tandem.errors import ConfigError

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

Compile = bool | Literal["auto"]
"""auto: on CUDA, where the machine can."""
_MOST_KINDS = 16
"""Versions of its code that a layer's forward may have."""


def compiled(forward: Callable[..., Any], backend: str, checkpointing: str) -> Callable[..., Any]:
    """A function compiled for any number of tokens.

    The compiler keeps what it must not compute twice (products) and what is cheap to keep. With checkpointing:
    selective it also computes again what a product of the backward pass reads, such as the gated activation.
    """
    # Layers of a hybrid are of several kinds, each in passes that begin, continue or are alone; more would be eager.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_KINDS)
    chosen = _keeping_less(backend) if checkpointing == "selective" else backend
    fast: Callable[..., Any] = torch.compile(forward, dynamic=True, backend=chosen)
    return fast


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """A function of tensors, compiled for any number of elements where ``fuses`` says so of its first argument.

    Numbers that change from call to call must come as tensors (``number``): code is kept for each other one.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        if not fuses(first.device):
            return function(*args, **kwargs)
        result: R = for_any_size(function, f"{function.__name__.lstrip('_')} of the optimizer")(*args, **kwargs)
        return result

    return run


def fuses(device: torch.device) -> bool:
    """Whether ``fused`` functions are compiled: on a CUDA device, where each eager operation is a launch."""
    return device.type == "cuda" and decide("auto", device)


def number(value: float, like: Tensor) -> float | Tensor:
    """A number as ``fused`` functions take it: on a CUDA device it is filled in there, without synchronization."""
    if like.device.type != "cuda":
        return value
    return torch.full((), value, dtype=torch.int32 if isinstance(value, int) else torch.float32, device=like.device)


@cache
def for_any_size(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    """A function compiled for any sizes, with code of its own for each ``part``."""
    fast: Callable[..., Any] = torch.compile(function, dynamic=True, backend=forgiving("inductor", part))
    return fast


@cache
def forgiving(backend: str, part: str) -> Callable[..., Any]:
    """The compiler with code of its own for each ``part``; a graph that it cannot build runs as it is, with a warning.

    Triton fails to build some kernels on some cards ("PassManager::run failed"), for sizes that may first come late.
    """
    from torch._dynamo.exc import RestartAnalysis  # here, where it is needed: the compiler takes a while to be imported

    make: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

    def compile_or_run(graph: Any, inputs: Any, **options: Any) -> Any:
        try:
            return make(graph, inputs, **options)
        except RestartAnalysis:  # no failure: the compiler asks for the graph once more
            raise
        except Exception as error:
            reason = traceback.format_exception_only(error)[-1].strip().rpartition("\n")[2]
            log.warning("%s cannot be compiled and runs uncompiled, slower: %s", part, reason)
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
        lacks = f"C compiler ({', '.join(known)}, or {variable})"
        return f"compiler {named!r}, which {variable} names" if named else lacks
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"Python header {header} (python3-dev)"
