"""The flags of Atropos' vLLM server (``vllm_api_server.py --model ... --enable-lora``), for an engine that is served.

Its own flags and those of vLLM's engine that Tandem sets are declared here; every other one is handed to vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.compat.atropos.options import AtroposTranslation
from tandem.errors import ConfigError
from tandem.types import Json

SLOTS = 8
"""Versions of an adapter that are held at once where nobody says: as many as Atropos' trainer needs by its defaults."""


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The command line of Atropos' vLLM server."""

    model: str = field(metadata={"also": ("--model-name",)})
    """Hugging Face id or a local folder."""
    host: str | None = None
    """Address to listen at; left out: 127.0.0.1, since the server asks for no key."""
    port: int = 9001
    """Port to listen at."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that the engine takes."""
    max_model_len: int | None = None
    """Longest context; left out: the model's own."""
    dtype: str = "auto"
    """Type of the weights: bfloat16 or float32; auto and float16 are bfloat16, as in the trainer."""
    tensor_parallel_size: int = field(default=1, metadata={"also": ("-tp",)})
    """GPUs of the engine; weights are shared with a trainer on 1 alone."""
    enable_lora: bool = False
    """Serve adapters, as --weight-bridge-mode lora_only needs."""
    max_lora_rank: int = 16
    """Largest rank of an adapter."""
    max_loras: int | None = None
    """Versions of an adapter that are held at once, 2 or more; left out: 8."""
    max_num_seqs: int = 256
    """Most answers sampled at once."""
    enforce_eager: bool = False
    """Do without CUDA graphs; nothing here needs it."""
    seed: int = 0
    """Where sampling's random numbers begin."""
    log_level: str | None = None
    """What the server tells of requests goes to its log."""
    root_path: str | None = None
    """Paths are not rewritten."""
    ssl_keyfile: str | None = None
    """Refused: put a proxy with TLS before it."""
    ssl_certfile: str | None = None
    """Refused: put a proxy with TLS before it."""
    ssl_ca_certs: str | None = None
    """Refused: put a proxy with TLS before it."""
    ssl_cert_reqs: int = 0
    """Changes nothing without TLS."""
    enable_ssl_refresh: bool = False
    """Changes nothing without TLS."""


def translate(
    flags: ServerFlags, given: frozenset[str], rest: Mapping[str, Json], environ: Mapping[str, str]
) -> AtroposTranslation:
    """A recipe whose engine is what the flags ask for.

    Args:
        flags: every flag, with its default where it was left out.
        given: names of those that were not left out.
        rest: other options of vLLM's server, by name.
        environ: VLLM_ENABLE_SHARED_WEIGHTS and LOGDIR are read.

    Raises:
        ConfigError: with every flag that is wrong or asks for what cannot be had.
    """
    wrong = [
        *(f"--{name.replace('_', '-')}: there is no TLS here; put a proxy before it" for name in _TLS if name in given),
        *([f"--dtype: it is bfloat16 or float32, not {flags.dtype}"] if flags.dtype not in _DTYPES else []),
    ]
    if wrong:
        head = "" if len(wrong) == 1 else f"the command line has {len(wrong)} problems:\n  "
        raise ConfigError(head + "\n  ".join(wrong))
    shared = environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "0").strip() == "1"
    slots = max(2, flags.max_loras or SLOTS)
    adapter: Json = {"kind": "lora", "rank": flags.max_lora_rank, "target_modules": "all-linear"}
    options: dict[str, Json] = {
        "model": flags.model,
        "steps": 1,
        "env": "arithmetic",
        "runs": ".",
        "trainable": adapter if flags.enable_lora else {"kind": "full"},
        "sync": {"kind": "hotswap" if flags.enable_lora else "shared" if shared else "broadcast"},
        **({"max_lag": slots - 2} if flags.enable_lora and slots > 2 else {}),
        "engine": {
            "kind": "vllm",
            "host": flags.host or "127.0.0.1",
            "port": flags.port,
            "gpu_memory_utilization": flags.gpu_memory_utilization,
            "max_num_seqs": flags.max_num_seqs,
            "enforce_eager": flags.enforce_eager,
            "tensor_parallel_size": flags.tensor_parallel_size,
            **({"args": dict(rest)} if rest else {}),
        },
        "dtype": _DTYPES[flags.dtype],
        "seed": flags.seed,
        **({"context": flags.max_model_len} if flags.max_model_len else {}),
    }
    return AtroposTranslation(
        options=options,
        notes=tuple(_notes(flags, given, shared=shared)),
        environ={} if environ.get("LOGDIR") else {"LOGDIR": "."},
    )


_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
_DTYPES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float16": "bfloat16", "half": "bfloat16", "float32": "float32"}


def _notes(flags: ServerFlags, given: frozenset[str], *, shared: bool) -> list[str]:
    """What a person should know of how it differs from the flags."""
    notes = []
    if flags.dtype not in ("bfloat16", "float32"):
        notes.append(f"--dtype: {flags.dtype} is bfloat16, in which Atropos' trainer computes: both have one type here")
    if flags.max_loras == 1:
        notes.append("--max-loras: it is 2, since requests end on the version that they began with")
    if flags.enable_lora and shared:
        notes.append(
            "VLLM_ENABLE_SHARED_WEIGHTS: with --enable-lora adapters are served; weights are lent when asked for"
        )
    unread = {"log_level": "the engine's log has its own", "root_path": "no proxy rewrites paths"}
    unread |= dict.fromkeys(("ssl_cert_reqs", "enable_ssl_refresh"), "there is no TLS")
    notes += [f"--{name.replace('_', '-')}: it changes nothing: {why}" for name, why in unread.items() if name in given]
    return notes


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
