"""ms-swift's command line: its arguments as a recipe, and its file of completions.

``options`` declares every argument once; ``rlhf`` and ``deploy`` say what a command line comes to. An argument
that would change the result and cannot be had is refused with the reason, one that cannot matter is told; none is
silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem_compat.swift.options import DEPLOY, RLHF
from tandem_compat.table import Reader, Translation, by_name

KEY_VARIABLE = "TANDEM_SWIFT_API_KEY"
"""Environment variable that --api_key is handed on by."""


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

    return SwiftRecipe.of_command_line(by_name(*RLHF), words).translation(environ)


def deploy(words: Mapping[str, Sequence[str]]) -> Translation:
    """Translate the arguments of ``swift deploy`` or ``swift rollout`` to a recipe with that engine.

    Raises:
        ConfigError: with every argument that is wrong or would change nothing.
    """
    args = Reader.of_command_line(by_name(*DEPLOY), words)
    lora, modules = args["vllm_enable_lora"], args["target_modules"]
    args.put("engine", {"kind": "vllm", "gpu_memory_utilization": 0.9})
    args.settle_all({"lora": bool(lora)})
    args.require("model", "a Hugging Face id or a folder")
    if args["host"] == "0.0.0.0" and not args["api_key"]:
        args.note("host", "whoever reaches this machine can overwrite the weights; use 127.0.0.1, or --api_key")
    if args["api_key"]:
        args.put("engine.api_key_variable", KEY_VARIABLE)
    args.put("trainable.kind", "lora" if lora else "full")
    if lora:
        args.put("trainable.target_modules", "all-linear" if modules == ["all-linear"] else modules)
    args.recipe |= {"steps": 1, "env": "arithmetic", "sync": {"kind": "broadcast"}}
    return args.translated({KEY_VARIABLE: args["api_key"]} if args["api_key"] else {})
