"""The flags of Atropos' environments (``gsm8k_server.py serve --env.group_size 8 ...``) as options of ``tandem work``.

A flag that has no meaning here is told, and one that asks for what Tandem does not do is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.types import Json

KEY_VARIABLE = "TANDEM_OPENAI_API_KEY"
"""Environment variable that --openai.api_key is handed on by."""


def _flag(name: str, default: Any = None) -> Any:
    return field(default=default, metadata={"flag": f"--{name}"})


@dataclass(frozen=True, kw_only=True)
class EnvFlags:
    """The command line of an Atropos environment; the names are its, and so are the defaults."""

    group_size: int = _flag("env.group_size", 4)
    """Answers sampled per task."""
    max_num_workers: int = _flag("env.max_num_workers", -1)
    """Groups played at once; -1: max_num_workers_per_node for each engine."""
    max_num_workers_per_node: int = _flag("env.max_num_workers_per_node", 8)
    """Groups played at once for each engine."""
    max_token_length: int = _flag("env.max_token_length", 2048)
    """Most tokens of a prompt and its answer together."""
    max_batches_offpolicy: int = _flag("env.max_batches_offpolicy", 3)
    """Batches that may be queued before the environment pauses."""
    total_steps: int = _flag("env.total_steps", 1000)
    """Steps of the trainer after which to end; -1: as many as it says it will take."""
    tokenizer_name: str | None = _flag("env.tokenizer_name")
    """Hugging Face id or folder of the tokenizer; left out: openai.tokenizer_name, openai.model_name, or else the
    engine's."""
    rollout_server_url: str = _flag("env.rollout_server_url", "http://localhost:8000")
    """The broker."""
    ensure_scores_are_not_same: str = _flag("env.ensure_scores_are_not_same", "True")
    """Leave out groups whose scores are all equal."""
    min_batch_allocation: float | None = _flag("env.min_batch_allocation")
    """Least share of every batch, 0 to 1."""
    inference_weight: float = _flag("env.inference_weight", 1.0)
    """Share of the generation against other environments'."""
    worker_timeout: float = _flag("env.worker_timeout", 600.0)
    """Seconds one group may take; -1: no limit."""
    wandb_name: str | None = _flag("env.wandb_name")
    """Name at the broker; left out: the environment's."""
    use_wandb: str = _flag("env.use_wandb", "False")
    """The trainer logs; this environment does not."""
    include_messages: str = _flag("env.include_messages", "True")
    """Messages always travel with their tokens."""
    batch_size: int = _flag("env.batch_size", -1)
    """The trainer says how large its batches are."""
    steps_per_eval: int | None = _flag("env.steps_per_eval")
    """The trainer evaluates."""
    eval_handling: str | None = _flag("env.eval_handling")
    """The trainer evaluates."""
    eval_limit_ratio: float | None = _flag("env.eval_limit_ratio")
    """The trainer evaluates."""
    max_eval_workers: int | None = _flag("env.max_eval_workers")
    """The trainer evaluates."""
    data_dir_to_save_evals: str | None = _flag("env.data_dir_to_save_evals")
    """The trainer evaluates."""
    data_path_to_save_groups: str | None = _flag("env.data_path_to_save_groups")
    """The trainer keeps rollouts in its run's folder."""
    num_rollouts_to_keep: int | None = _flag("env.num_rollouts_to_keep")
    """The trainer keeps rollouts in its run's folder."""
    num_rollouts_per_group_for_logging: int | None = _flag("env.num_rollouts_per_group_for_logging")
    """The trainer keeps rollouts in its run's folder."""
    min_items_sent_before_logging: int | None = _flag("env.min_items_sent_before_logging")
    """How it goes is told every ten seconds."""
    base_url: str = _flag("openai.base_url", "http://localhost:9001/v1")
    """The engine; several are separated by commas."""
    model_name: str | None = _flag("openai.model_name")
    """What the engine calls the model; default, and left out: as the tokenizer."""
    openai_tokenizer_name: str | None = _flag("openai.tokenizer_name")
    """Tokenizer of the engine's model, where env.tokenizer_name does not say."""
    api_key: str = _flag("openai.api_key", "")
    """The engine's API key."""
    server_type: str = _flag("openai.server_type", "vllm")
    """vllm or openai; which it is, is found out."""
    timeout: float = _flag("openai.timeout", 1200.0)
    """Seconds one answer may take."""
    num_max_requests_at_once: int | None = _flag("openai.num_max_requests_at_once")
    """The engine queues what it cannot sample at once."""
    num_requests_for_eval: int | None = _flag("openai.num_requests_for_eval")
    """The trainer evaluates."""
    n_kwarg_is_ignored: str | None = _flag("openai.n_kwarg_is_ignored")
    """Answers are asked for one by one."""
    health_check: str | None = _flag("openai.health_check")
    """An engine that does not answer is left alone for a while, without being asked for its health."""
    rolling_buffer_length: int | None = _flag("openai.rolling_buffer_length")
    """No times of requests are kept."""
    tracing_enabled: str | None = _flag("openai.tracing_enabled")
    """Nothing is traced."""
    teacher_enabled: str = _flag("env.teacher_enabled", "False")
    """Refused: no loss reads a teacher's logprobs."""
    teacher_top_k: int | None = _flag("env.teacher_top_k")
    """There is no teacher."""
    teacher_base_url: str | None = _flag("teacher.base_url")
    """There is no teacher."""
    teacher_model_name: str | None = _flag("teacher.model_name")
    """There is no teacher."""
    teacher_server_type: str | None = _flag("teacher.server_type")
    """There is no teacher."""
    teacher_tokenizer_name: str | None = _flag("teacher.tokenizer_name")
    """There is no teacher."""
    config: str | None = _flag("config")
    """YAML file with the sections env and openai; flags go before it."""
    slurm: str = _flag("slurm", "False")
    """Engines are named by openai.base_url."""
    testing: str = _flag("testing", "False")
    """There is no pretended engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTranslation:
    """What a command line comes to."""

    options: dict[str, Json]
    """Options of ``tandem work``."""
    environ: dict[str, str]
    """Environment variables that the options name."""
    notes: tuple[str, ...]
    """What a person should know of flags without a meaning here."""


_MEANINGLESS = (
    "batch_size", "steps_per_eval", "eval_handling", "eval_limit_ratio", "max_eval_workers", "data_dir_to_save_evals",
    "data_path_to_save_groups", "num_rollouts_to_keep", "num_rollouts_per_group_for_logging",
    "min_items_sent_before_logging", "num_max_requests_at_once", "num_requests_for_eval", "n_kwarg_is_ignored",
    "health_check", "rolling_buffer_length", "tracing_enabled", "teacher_top_k", "teacher_base_url",
    "teacher_model_name", "teacher_server_type", "teacher_tokenizer_name",
)  # fmt: skip
_NEVER = {
    "slurm": "name the engines by --openai.base_url",
    "testing": "run a real engine: tandem serve engine RECIPE",
    "teacher_enabled": "no loss reads a teacher's logprobs; leave the teacher's flags out",
}


def translate(env: str, flags: EnvFlags, given: frozenset[str]) -> EnvTranslation:
    """Options of ``tandem work`` that do what the flags ask for.

    Args:
        env: the environment's name.
        flags: every flag, with its default where it was left out.
        given: names of those that were not left out.

    Raises:
        ConfigError: with every flag that is wrong.
    """
    wrong = list(_wrong(flags))
    if wrong:
        head = "" if len(wrong) == 1 else f"the command line has {len(wrong)} problems:\n  "
        raise ConfigError(head + "\n  ".join(wrong))
    served = flags.model_name if flags.model_name not in (None, "default") else None
    urls = [url.strip() for url in flags.base_url.split(",") if url.strip()]
    engine: dict[str, Json] = {"urls": urls, "request_seconds": flags.timeout}
    if served is not None:
        engine["model"] = served
    if flags.api_key:
        engine["api_key_variable"] = KEY_VARIABLE
    many = flags.max_num_workers if flags.max_num_workers > 0 else flags.max_num_workers_per_node * len(urls)
    options: dict[str, Json] = {
        "model": flags.tokenizer_name or flags.openai_tokenizer_name or served,
        "env": env,
        "broker": flags.rollout_server_url,
        "engine": engine,
        "group_size": flags.group_size,
        "sampling": {"max_tokens": flags.max_token_length},
        "context": flags.max_token_length,
        "zero_variance_groups": "drop" if _truth(flags.ensure_scores_are_not_same) else "keep",
        "n": many,
        "ahead": float(flags.max_batches_offpolicy),
        "total_steps": flags.total_steps if flags.total_steps >= 0 else None,
        "known_as": flags.wandb_name,
        "weight": flags.inference_weight,
        "min_share": flags.min_batch_allocation,
        **({"group_seconds": flags.worker_timeout} if flags.worker_timeout > 0 else {"group_seconds": float("inf")}),
    }
    environ = {KEY_VARIABLE: flags.api_key} if flags.api_key else {}
    return EnvTranslation(options=options, environ=environ, notes=tuple(_notes(flags, given)))


def named(flags: EnvFlags) -> bool:
    """Whether the flags say which tokenizer it is."""
    return bool(flags.tokenizer_name or flags.openai_tokenizer_name or flags.model_name not in (None, "default"))


def from_file(path: Path) -> dict[str, Any]:
    """The flags that a YAML file of Atropos' gives, by field of ``EnvFlags``.

    Raises:
        ConfigError: it cannot be read, or has an option that there is not.
    """
    import yaml  # which --help of the other verbs need not wait for

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} is not a mapping of env, openai, slurm and testing")
    servers = found.pop("openai", None) or {}
    servers = servers if isinstance(servers, list) else [servers]
    urls = [server["base_url"] for server in servers if server.get("base_url")]
    flat = {f"env.{key}": value for key, value in (found.pop("env", None) or {}).items()}
    flat |= {f"openai.{key}": value for key, value in (servers[0] if servers else {}).items() if key != "weight"}
    flat |= found | ({"openai.base_url": ",".join(urls)} if urls else {})
    fields_of = {flag.removeprefix("--"): name for name, flag in _names().items()}
    if unknown := [key for key in flat if key not in fields_of]:
        raise ConfigError(f"--config {path}: there is no {', '.join(unknown)} (tandem env --help lists what there is)")
    texts = {f.name for f in fields(EnvFlags) if f.type.startswith("str")}
    given = {fields_of[key]: value for key, value in flat.items() if value is not None}
    return {name: str(value) if name in texts else value for name, value in given.items()}


def _wrong(flags: EnvFlags) -> Iterator[str]:
    names = _names()
    for name in ("ensure_scores_are_not_same", "use_wandb", "include_messages", *_NEVER):
        if _truth(getattr(flags, name)) is None:
            yield f"{names[name]} takes True or False, not {getattr(flags, name)!r}"
    for name, advice in _NEVER.items():
        if _truth(getattr(flags, name)):
            yield f"{names[name]} True is not done here; {advice}"
    if flags.server_type not in ("vllm", "openai"):
        yield (
            f"--openai.server_type {flags.server_type} cannot be sampled from: it takes vllm or openai, of a server "
            "that tells token ids and logprobs"
        )
    if not named(flags):
        yield "--env.tokenizer_name is missing: which tokenizer does the engine's model have?"
    if flags.inference_weight <= 0:
        yield f"--env.inference_weight must be above 0, not {flags.inference_weight:g}; leave it out for a weight of 1"


def _notes(flags: EnvFlags, given: frozenset[str]) -> Iterator[str]:
    """Why flags that were given change nothing, each in the words of its help."""
    from tandem.config.registry import field_docs

    docs, names = field_docs(EnvFlags), _names()
    for name in _MEANINGLESS:
        if name in given and not (name == "batch_size" and flags.batch_size < 0):
            yield f"{names[name]} changes nothing: {docs[name].rstrip('.')}"
    for name, matters in (("use_wandb", True), ("include_messages", False)):
        if name in given and _truth(getattr(flags, name)) is matters:
            yield f"{names[name]} changes nothing: {docs[name].rstrip('.')}"


def _names() -> Mapping[str, str]:
    return {f.name: f.metadata["flag"] for f in fields(EnvFlags)}


def _truth(text: str) -> bool | None:
    """True or False as people write them; None if it is neither."""
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
