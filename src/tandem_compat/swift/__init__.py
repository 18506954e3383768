"""ms-swift's command line: its arguments as a recipe, and its file of completions.

``options`` declares every argument once; ``rlhf`` and ``deploy`` say what a command line comes to. An argument
that would change the result and cannot be had is refused with the reason, one that cannot matter is told; none is
silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.types import Json
from tandem_compat.swift.options import DEPLOY, RLHF
from tandem_compat.table import Reader, Takes, Translation, by_name

KEY_VARIABLE = "TANDEM_SWIFT_API_KEY"
"""Environment variable that --api_key is handed on by."""


def _that_take(*kinds: Takes) -> frozenset[str]:
    rows = (row for row in (*RLHF, *DEPLOY) if row.takes in kinds)
    return frozenset(f"--{name}" for row in rows for name in (row.name, *row.also))


SEVERAL = _that_take("texts", "numbers")
"""Arguments that have several values."""
TRUTHS = _that_take("truth")
"""Arguments that are true or false; alone they are true."""


def repeated(words: Sequence[str]) -> list[str]:
    """The command line with ``--dataset a b`` as ``--dataset a --dataset b``; OPTION=VALUE ends the values.

    ``--use_vllm`` without a value is ``--use_vllm true``.
    """
    out: list[str] = []
    several = ""
    first = False
    for word in words:
        if out and out[-1] in TRUTHS and (word.startswith("--") or "=" in word):
            out.append("true")
        if word.startswith("--"):
            several, first = (word, True) if word in SEVERAL else ("", False)
        elif several and (first or "=" not in word):
            out += [] if first else [several]
            first = False
        else:
            several = ""
        out.append(word)
    return [*out, "true"] if out and out[-1] in TRUTHS else out


def rlhf(words: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Translation:
    """Translate the arguments of ``swift rlhf --rlhf_type grpo`` to a recipe.

    Args:
        words: the values of every argument that was given.
        environ: what a launcher sets, or else NPROC_PER_NODE and NNODES, say how many ranks there are;
            CUDA_VISIBLE_DEVICES is read.

    Raises:
        ConfigError: with every argument that is wrong or would change nothing.
        EnvError: the data, whose rows say how many steps an epoch has, cannot be read.
    """
    from tandem_compat.swift.rules import SwiftRecipe

    args = Reader.of_command_line(by_name(*RLHF), words)
    options, notes = SwiftRecipe(args, environ).recipe()
    args.problems.raise_if_any("the command line")
    return Translation(options=options, notes=tuple(notes))


def deploy(words: Mapping[str, Sequence[str]]) -> Translation:
    """Translate the arguments of ``swift deploy`` or ``swift rollout`` to a recipe with that engine.

    Raises:
        ConfigError: with every argument that is wrong or would change nothing.
    """
    from tandem_compat.swift.parts import started

    args = Reader.of_command_line(by_name(*DEPLOY), words)
    lora = args["vllm_enable_lora"]
    args.settle_all({} if lora else {"adapter": "without --vllm_enable_lora true: whole weights are received"})
    if not args["model"]:
        args.wrong("model", "it is missing: a Hugging Face id or a folder")
    if args["infer_backend"] != "vllm":
        args.wrong("infer_backend", f"an engine that receives weights is vllm, not {args['infer_backend']}")
    args.only("torch_dtype", {"bfloat16": 1, "float32": 1})
    if args["host"] == "0.0.0.0" and not args["api_key"]:
        why = "whoever reaches this machine can overwrite the engine's weights; 127.0.0.1, or --api_key, keeps it apart"
        args.note("host", why)
    args.problems.raise_if_any("the command line")
    replicas = args["vllm_data_parallel_size"]
    engine: dict[str, Json] = {
        "kind": "vllm",
        "host": args["host"],
        "port": args["port"],
        "gpu_memory_utilization": 0.9,
        **started(args),
        **({"replicas": replicas} if replicas != 1 else {}),
        **({"api_key_variable": KEY_VARIABLE} if args["api_key"] else {}),
    }
    options: dict[str, Json] = {
        "model": args["model"],
        "steps": 1,
        "env": "arithmetic",
        "trainable": _adapter(args) if lora else {"kind": "full"},
        "engine": engine,
        "sync": {"kind": "broadcast"},
        "dtype": args["torch_dtype"],
        "seed": args["seed"],
        **({"context": args["max_length"]} if args["max_length"] is not None else {}),
    }
    environ = {KEY_VARIABLE: args["api_key"]} if args["api_key"] else {}
    return Translation(options=options, notes=tuple(args.notes), environ=environ)


def _adapter(args: Reader) -> dict[str, Json]:
    """The adapter that an engine is made ready for."""
    modules = args["target_modules"]
    return {
        "kind": "lora",
        "rank": args["vllm_max_lora_rank"],
        "target_modules": "all-linear" if modules == ["all-linear"] else modules,
    }
