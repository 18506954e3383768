"""``tandem atropos-server``: the flags of Atropos' vLLM server as a recipe whose engine is served alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tandem.types import Json
from tandem_compat.atropos.options import SERVER
from tandem_compat.table import Reader, Translation

_DTYPES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float16": "bfloat16", "half": "bfloat16", "float32": "float32"}


def translate(values: Mapping[str, Json], rest: Mapping[str, Json], environ: Mapping[str, str]) -> Translation:
    """A recipe whose engine is what the flags ask for.

    Args:
        values: the values of every flag that was given.
        rest: other options of vLLM's server, by name.
        environ: VLLM_ENABLE_SHARED_WEIGHTS and LOGDIR are read.

    Raises:
        ConfigError: with every flag that is wrong or asks for what cannot be had.
    """
    flags = Reader.of_command_line(SERVER, values)
    dtype, lora, max_loras = flags["dtype"], flags["enable-lora"], max(2, flags["max-loras"])
    flags.settle_all({} if lora else {"adapter": "without --enable-lora"})
    shared = environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "0").strip() == "1"
    if not flags["model"]:
        flags.wrong("model", "it is missing: a Hugging Face id or a folder")
    if dtype not in _DTYPES:
        flags.wrong("dtype", f"it is bfloat16 or float32, not {dtype}")
    flags.problems.raise_if_any("the command line")
    if dtype not in ("bfloat16", "float32"):
        flags.note("dtype", f"{dtype} is bfloat16, in which Atropos' trainer computes: both have one type here")
    if lora and flags["max-loras"] < 2:
        flags.note("max-loras", "it is 2, since requests end on the version that they began with")
    if lora and shared:
        flags.notes.append(
            "VLLM_ENABLE_SHARED_WEIGHTS: with --enable-lora adapters are served; weights are lent when asked for"
        )
    trained: Json = {"kind": "lora", "rank": flags["max-lora-rank"], "target_modules": "all-linear"}
    options: dict[str, Json] = {
        "model": flags["model"],
        "steps": 1,
        "env": "arithmetic",
        "runs": ".",
        "trainable": trained if lora else {"kind": "full"},
        "sync": {"kind": "hotswap" if lora else "shared" if shared else "broadcast"},
        **({"max_lag": max_loras - 2} if lora and max_loras > 2 else {}),
        "engine": {
            "kind": "vllm",
            "host": flags["host"] or "127.0.0.1",
            "port": flags["port"],
            "gpu_memory_utilization": flags["gpu-memory-utilization"],
            "max_num_seqs": flags["max-num-seqs"],
            "enforce_eager": flags["enforce-eager"],
            "tensor_parallel_size": flags["tensor-parallel-size"],
            **({"args": dict(rest)} if rest else {}),
        },
        "dtype": _DTYPES[dtype],
        "seed": flags["seed"],
        **({"context": flags["max-model-len"]} if flags["max-model-len"] else {}),
    }
    return Translation(
        options=options, notes=tuple(flags.notes), environ={} if environ.get("LOGDIR") else {"LOGDIR": "."}
    )


def divided(words: Sequence[str]) -> tuple[dict[str, Json], list[str]]:
    """Options of vLLM's server among the words of a command line, and the other words, which are overrides.

    An option has the next word for its value, unless that is an option or an override itself; then it is true.
    """
    options: dict[str, Json] = {}
    overrides: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = value or True
            name = "" if value else name
        elif name and not re.match(r"[a-z_]+(\.[\w-]+)*=", word):
            options[name] = word
            name = ""
        else:
            overrides.append(word)
            name = ""
    return options, overrides
