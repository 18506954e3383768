"""ms-swift's command line: its arguments as a recipe, and its file of completions.

``options`` declares every argument once; ``rlhf`` and ``deploy`` say what a command line comes to. An argument
that would change the result and cannot be had is refused with the reason, one that cannot matter is told; none is
silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.compat.swift.options import DEPLOY, RLHF
from tandem.compat.table import Reader, Translation, by_name
from tandem.types import Json

KEY_VARIABLE = "TANDEM_SWIFT_API_KEY"
"""Environment variable that --api_key is handed on by."""

SEVERAL = frozenset(
    f"--{name}"
    for argument in (*RLHF, *DEPLOY)
    if argument.takes in ("texts", "numbers")
    for name in (argument.name, *argument.also)
)
"""Arguments that have several values."""


def repeated(words: Sequence[str]) -> list[str]:
    """The command line with ``--dataset a b`` as ``--dataset a --dataset b``; OPTION=VALUE ends the values."""
    out: list[str] = []
    several = ""
    first = False
    for word in words:
        if word.startswith("--"):
            several, first = (word, True) if word in SEVERAL else ("", False)
        elif several and (first or "=" not in word):
            out += [] if first else [several]
            first = False
        else:
            several = ""
        out.append(word)
    return out


def rlhf(words: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Translation:
    """A recipe that does what ``swift rlhf --rlhf_type grpo`` is asked for.

    Args:
        words: the values of every argument that was given.
        environ: the ranks of a launcher (NPROC_PER_NODE, NNODES, WORLD_SIZE, RANK) and CUDA_VISIBLE_DEVICES are read.

    Raises:
        ConfigError: with every argument that is wrong or would change nothing.
        EnvError: the data, whose rows say how many steps an epoch has, cannot be read.
    """
    from tandem.compat.swift.rules import SwiftRecipe

    given = Reader.of_command_line(by_name(*RLHF), words)
    options, notes = SwiftRecipe(given, environ).recipe()
    given.problems.raise_if_any("the command line")
    return Translation(options=options, notes=tuple(notes))


def deploy(words: Mapping[str, Sequence[str]]) -> Translation:
    """A recipe whose engine is what ``swift deploy`` or ``swift rollout`` is asked for.

    Raises:
        ConfigError: with every argument that is wrong or would change nothing.
    """
    from tandem.compat.swift.parts import started

    given = Reader.of_command_line(by_name(*DEPLOY), words)
    lora = given["vllm_enable_lora"]
    adapter = "" if lora else "without --vllm_enable_lora true: whole weights are received"
    for name in given.values:
        given.settle(name, adapter if given.table[name].where == "adapter" else "")
    if not given["model"]:
        given.wrong("model", "it is missing: a Hugging Face id or a folder")
    if given["infer_backend"] != "vllm":
        given.wrong("infer_backend", f"an engine that receives weights is vllm, not {given['infer_backend']}")
    given.only("torch_dtype", {"bfloat16": 1, "float32": 1})
    if given["host"] == "0.0.0.0" and not given["api_key"]:
        why = "whoever reaches this machine can overwrite the engine's weights; 127.0.0.1, or --api_key, keeps it apart"
        given.note("host", why)
    given.problems.raise_if_any("the command line")
    replicas = given["vllm_data_parallel_size"]
    engine: dict[str, Json] = {
        "kind": "vllm",
        "host": given["host"],
        "port": given["port"],
        "gpu_memory_utilization": 0.9,
        **started(given),
        **({"replicas": replicas} if replicas > 1 else {}),
        **({"api_key_variable": KEY_VARIABLE} if given["api_key"] else {}),
    }
    options: dict[str, Json] = {
        "model": given["model"],
        "steps": 1,
        "env": "arithmetic",
        "trainable": _adapter(given) if lora else {"kind": "full"},
        "engine": engine,
        "sync": {"kind": "broadcast"},
        "dtype": given["torch_dtype"],
        "seed": given["seed"],
        **({"context": given["max_length"]} if given["max_length"] else {}),
    }
    environ = {KEY_VARIABLE: given["api_key"]} if given["api_key"] else {}
    return Translation(options=options, notes=tuple(given.notes), environ=environ)


def _adapter(given: Reader) -> dict[str, Json]:
    """The adapter that an engine is made ready for."""
    modules = given["target_modules"]
    return {
        "kind": "lora",
        "rank": given["vllm_max_lora_rank"],
        "target_modules": "all-linear" if modules == ["all-linear"] else modules,
    }
