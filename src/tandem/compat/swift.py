"""ms-swift's command line: its arguments as a recipe, and its file of completions.

``_swift_arguments`` declares every argument once; ``rlhf`` and ``deploy`` say what a command line comes to. An argument
that would change the result and cannot be had is refused with the reason, one that cannot matter is told; none is
silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.compat._swift_arguments import DEPLOY, RLHF
from tandem.observability.loggers.base import RunInfo, Sink, Writer
from tandem.types import Json

if TYPE_CHECKING:
    from tandem.compat._swift_given import Given

KEY_VARIABLE = "TANDEM_SWIFT_API_KEY"
"""Environment variable that --api_key is handed on by."""

SEVERAL = frozenset(
    f"--{name}"
    for argument in (*RLHF, *DEPLOY)
    if argument.takes in ("texts", "numbers")
    for name in (argument.name, *argument.also)
)
"""Arguments that have several values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What a command line comes to."""

    options: dict[str, Json]
    """The recipe."""
    notes: tuple[str, ...]
    """What a person should know of how it differs from the arguments."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the recipe names."""


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
    from tandem.compat._swift_given import Given
    from tandem.compat._swift_recipe import Reading
    from tandem.config.tree import Problems

    problems = Problems()
    given = Given(RLHF, words, problems)
    problems.raise_if_any("the command line")
    options, notes = Reading(given, environ).recipe()
    problems.raise_if_any("the command line")
    return Translation(options=options, notes=tuple(notes))


def deploy(words: Mapping[str, Sequence[str]]) -> Translation:
    """A recipe whose engine is what ``swift deploy`` or ``swift rollout`` is asked for.

    Raises:
        ConfigError: with every argument that is wrong or would change nothing.
    """
    from tandem.compat._swift_given import Given
    from tandem.compat._swift_parts import started
    from tandem.config.tree import Problems

    problems = Problems()
    given = Given(DEPLOY, words, problems)
    problems.raise_if_any("the command line")
    lora = given["vllm_enable_lora"]
    adapter = "" if lora else "without --vllm_enable_lora true: whole weights are received"
    notes = given.settle({"vllm": "", "colocate": "", "adapter": adapter})
    if not given["model"]:
        given.wrong("model", "it is missing: a Hugging Face id or a folder")
    if given["infer_backend"] != "vllm":
        given.wrong("infer_backend", f"an engine that receives weights is vllm, not {given['infer_backend']}")
    given.only("torch_dtype", {"bfloat16": 1, "float32": 1})
    if given["host"] == "0.0.0.0" and not given["api_key"]:
        why = "whoever reaches this machine can overwrite the engine's weights; 127.0.0.1, or --api_key, keeps it apart"
        given.note("host", why)
    problems.raise_if_any("the command line")
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
        "trains": _adapter(given) if lora else {"kind": "full"},
        "engine": engine,
        "sync": {"kind": "broadcast"},
        "dtype": given["torch_dtype"],
        "seed": given["seed"],
        **({"context": given["max_length"]} if given["max_length"] else {}),
    }
    environ = {KEY_VARIABLE: given["api_key"]} if given["api_key"] else {}
    return Translation(options=options, notes=tuple(notes), environ=environ)


def _adapter(given: Given) -> dict[str, Json]:
    """The adapter that an engine is made ready for."""
    modules = given["target_modules"]
    return {
        "kind": "lora",
        "rank": given["vllm_max_lora_rank"],
        "target_modules": "all-linear" if modules == ["all-linear"] else modules,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions(Sink):
    """Write completions.jsonl into the run's folder: a line for each step, with a list for each column."""

    def open(self, info: RunInfo) -> Writer:
        """Lines of steps after ``resumed_step`` are dropped: that future did not happen."""
        return _CompletionsWriter(info)


class _CompletionsWriter:
    def __init__(self, info: RunInfo) -> None:
        from tandem.observability.loggers import _lines

        self._folder = info.folder
        self._model, self._template = info.config["model"], info.config.get("chat_template")
        self._tokenizer: Any = None
        path = info.folder / "completions.jsonl"
        kept = [row for row in _lines.read(path) if int(row["step"][0]) <= info.resumed_step]
        if path.exists():
            _lines.replace(path, kept, durable=True)
        self._lines = _lines.Lines(path)
        self._written = int(kept[-1]["step"][0]) if kept else 0
        self._reached = info.resumed_step

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        # A run writes the rollouts of a step while it samples the next, and has them all before it closes its sinks.
        self._reached = step
        self._write_until(step - 1)

    def _write_until(self, step: int) -> None:
        """Add lines of steps up to this one; a killed run's last may be lacking."""
        for later in range(self._written + 1, step + 1):
            self._append(later)
            self._written = later

    def _append(self, step: int) -> None:
        from tandem.observability.loggers import _lines

        rows = list(_lines.read(self._folder / "rollouts" / f"{step:06d}.jsonl"))
        if not rows:
            return
        names = dict.fromkeys(name for row in rows for name in row["rewards"])
        self._lines.append(
            {
                "step": [str(step)] * len(rows),
                "prompt": [self._prompt(row) for row in rows],
                "completion": [row["text"] for row in rows],
                **{name: [row["rewards"].get(name) for row in rows] for name in names},
                "advantages": [row["advantage"] for row in rows],
            }
        )

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        return

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        return

    def close(self) -> None:
        self._write_until(self._reached)
        self._lines.close()

    def _prompt(self, row: Mapping[str, Json]) -> str:
        """The text that the engine was given, special tokens included."""
        if not row["prompts"]:
            return ""
        if self._tokenizer is None:
            from tandem.model.policy import load_tokenizer

            self._tokenizer = load_tokenizer(self._model, chat_template=self._template)
        _, ids = row["prompts"][0]
        return str(self._tokenizer.decode(ids))
