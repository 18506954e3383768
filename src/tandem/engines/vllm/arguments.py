"""The command line of vLLM's server: how options are written, and which of them a recipe may pass on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_OURS = frozenset((
    "--model", "--served-model-name", "--host", "--port", "--dtype", "--seed", "--max-model-len", "--max-num-seqs",
    "--tensor-parallel-size", "--logprobs-mode", "--worker-extension-cls", "--middleware", "--enforce-eager",
    "--enable-prefix-caching", "--gpu-memory-utilization", "--limit-mm-per-prompt", "--enable-lora",
    "--lora-target-modules", "--max-lora-rank", "--max-loras", "--max-cpu-loras", "--api-key", "--api-server-count",
    "--data-parallel-size", "--pipeline-parallel-size", "--enable-sleep-mode", "--kv-cache-memory-bytes",
))  # fmt: skip


def flag(name: str, value: Any) -> list[str]:
    """Words of the command line for an option; a tuple is several of them."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    if value is False:
        return [f"--no-{option[2:]}"]
    if isinstance(value, tuple):
        return [option, *map(str, value)]
    return [option, json.dumps(value) if isinstance(value, dict | list) else str(value)]


def not_free(name: str, value: Any) -> str:
    """Why an entry of ``args`` is no option of vLLM's server that is free to be set; empty if it is."""
    if name.startswith("-"):
        return f"begins with a dash, which is put before it anyway; name it {name.lstrip('-')}"
    if value is None:
        return "is null, which vLLM's server knows no word for; leave it out for the default"
    plain = name.replace("_", "-").removeprefix("no-").partition(".")[0]
    if any(option.startswith(f"--{plain}") for option in _OURS):  # it takes the beginning of a name for the whole
        return "is set by Tandem or is an option of its own; remove it from args"
    return ""


def with_grammar(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of vLLM's SamplingParams, ``regex`` among them as what it makes a grammar of."""
    if "regex" not in given:
        return given
    from vllm.sampling_params import StructuredOutputsParams

    rest = {name: value for name, value in given.items() if name != "regex"}
    return {**rest, "structured_outputs": StructuredOutputsParams(regex=given["regex"])}
