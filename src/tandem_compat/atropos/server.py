"""``tandem atropos-server``: the flags of Atropos' vLLM server as a recipe whose engine is served alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tandem.types import Json
from tandem_compat.atropos.options import DTYPES, SERVER
from tandem_compat.table import Reader, Translation


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
    flags.put("engine", {"kind": "vllm", "host": flags["host"] or "127.0.0.1"})
    flags.settle_all({"an adapter": bool(lora)})
    shared = environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "0").strip() == "1"
    flags.require("model", "a Hugging Face id or a folder")
    if dtype not in ("bfloat16", "float32"):
        flags.note("dtype", f"{dtype} is bfloat16, in which Atropos' trainer computes: both have one type here")
    if lora and flags["max-loras"] < 2:
        flags.note("max-loras", "it is 2, since requests end on the version that they began with")
    if lora and shared:
        flags.notes.append("VLLM_ENABLE_SHARED_WEIGHTS: with --enable-lora adapters are served")
    flags.put("trainable.kind", "lora" if lora else "full")
    if lora:
        flags.put("trainable.target_modules", "all-linear")
    if lora and max_loras > 2:
        flags.put("max_lag", max_loras - 2)
    if rest:
        flags.put("engine.args", dict(rest))
    flags.put("sync.kind", "hotswap" if lora else "shared" if shared else "broadcast")
    flags.recipe |= {"steps": 1, "env": "arithmetic", "runs": ".", "dtype": DTYPES[dtype]}
    return flags.translated({} if environ.get("LOGDIR") else {"LOGDIR": "."})


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
