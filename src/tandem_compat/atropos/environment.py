"""``tandem env``: the flags of Atropos' environments as options of ``tandem work``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tandem.errors import ConfigError
from tandem.types import Json
from tandem_compat.atropos.options import ENVIRONMENT
from tandem_compat.table import Reader, Translation

KEY_VARIABLE = "TANDEM_OPENAI_API_KEY"
"""Environment variable that --openai.api_key is handed on by."""


def translate(env: str, values: Mapping[str, Json]) -> Translation:
    """Options of ``tandem work`` that do what the flags ask for.

    Args:
        env: the environment's name.
        values: the values of every flag that was given.

    Raises:
        ConfigError: with every flag that is wrong.
    """
    flags = Reader.of_command_line(ENVIRONMENT, values)
    flags.settle_all({})
    if flags["openai.server_type"] not in ("vllm", "openai"):
        flags.wrong("openai.server_type", f"{flags['openai.server_type']} cannot be sampled from: it takes vllm or "
                    "openai, of a server that tells token ids and logprobs")  # fmt: skip
    if not (tokenizer := tokenizer_of(flags.values)):
        flags.wrong("env.tokenizer_name", "it is missing: which tokenizer does the engine's model have?")
    flags.raise_if_wrong()
    urls = [url.strip() for url in flags["openai.base_url"].split(",") if url.strip()]
    key, workers, seconds = flags["openai.api_key"], flags["env.max_num_workers"], flags["env.worker_timeout"]
    flags.put("engine.urls", urls)
    if served := _served(flags.values):
        flags.put("engine.model", served)
    if key:
        flags.put("engine.api_key_variable", KEY_VARIABLE)
    flags.put("sampling.max_tokens", flags["env.max_token_length"])
    flags.recipe |= {
        "model": tokenizer,
        "env": env,
        "zero_variance_groups": "drop" if flags["env.ensure_scores_are_not_same"] else "keep",
        "n": workers if workers > 0 else flags["env.max_num_workers_per_node"] * len(urls),
        "ahead": float(flags["env.max_batches_offpolicy"]),
        "total_steps": flags["env.total_steps"] if flags["env.total_steps"] >= 0 else None,
        "group_seconds": seconds if seconds > 0 else float("inf"),
    }
    return Translation(options=flags.recipe, notes=tuple(flags.notes), environ={KEY_VARIABLE: key} if key else {})


def _served(values: Mapping[str, Json]) -> Json:
    """What the engine calls its model, where a flag says so."""
    name = values.get("openai.model_name")
    return None if name == "default" else name


def tokenizer_of(values: Mapping[str, Json]) -> Json:
    """The tokenizer that flags name; None if none does."""
    return values.get("env.tokenizer_name") or values.get("openai.tokenizer_name") or _served(values)


def from_file(path: Path) -> dict[str, Json]:
    """The flags that a YAML file of Atropos' gives, as words.

    Raises:
        ConfigError: it cannot be read, or has an option that there is not.
    """
    import yaml  # which --help of the other verbs need not wait for

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path} is not a mapping of env, openai, slurm and testing")
    env, servers = (settings.pop(section, None) or {} for section in ("env", "openai"))
    servers = servers if isinstance(servers, list) else [servers]
    if not all(isinstance(options, dict) for options in (env, *servers)):
        raise ConfigError(f"--config {path}: env and openai are mappings of options, or openai a list of such")
    urls = [str(server["base_url"]) for server in servers if server.get("base_url")]
    values = {f"env.{key}": value for key, value in env.items()}
    values |= {f"openai.{key}": value for key, value in servers[0].items() if key != "weight"}
    values |= settings | ({"openai.base_url": ",".join(urls)} if urls else {})
    if unknown := [str(key) for key in values if key not in ENVIRONMENT]:
        raise ConfigError(f"--config {path}: there is no {', '.join(unknown)} (tandem env --help lists what there is)")
    for key in sorted({key for server in servers for key in server} - {"base_url", "weight"}):
        if any(server.get(key) != servers[0].get(key) for server in servers):
            raise ConfigError(f"--config {path}: openai: servers differ in {key}; of all of them it must be one")
    return {name: [str(value)] for name, value in values.items() if value is not None}
