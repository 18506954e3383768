"""Cache of what ``tandem check`` computed with torch and the model, valid while nothing of it has changed.

To import them and to run the model without memory takes 7 s of processor time, of which a second look at the same
recipe needs nothing: what comes out depends on the files of the model, the recipe, the prompts and the code alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import tandem
from tandem import machine
from tandem.config.loading import RunConfig, as_json
from tandem.trainer.memory_plan import MemoryLine, RankCounts, chooses_gradients
from tandem.types import Task

_UNREAD = frozenset(
    {
        "name",
        "runs",
        "seed",
        "steps",
        "loggers",
        "evaluate",
        "timeouts",
        "rewards",
        "advantage",
        "loss",
        "curriculum",
        "alarms",
    }
)
"""Options that neither prompts nor the memory plan depend on."""
_LIBRARIES = ("torch", "transformers", "tokenizers", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """Figures of the model."""

    model: str
    """Of its configuration."""
    prompts: str
    """Of the prompts' lengths."""
    lines: tuple[MemoryLine, ...]
    """Of the memory plan."""
    parameters: int
    """Numbers in its weights."""
    trainable: int
    """Those that are trained."""
    checkpoint_bytes: int
    """Of one checkpoint, at most."""


def place(config: RunConfig, tasks: Mapping[str, Sequence[Task]]) -> Path | None:
    """File of the cache for this recipe with these tasks; None where it depends on something not known this early.

    That is a model on the hub, a plan that is to be fitted into what is free, or in which ranks choose by that how they
    sum gradients, and a machine with an accelerator.
    """
    model, ranks = Path(config.model), RankCounts.of(config)
    by_room = config.memory == "fit" or chooses_gradients(config, ranks)
    if not model.is_dir() or by_room or machine.accelerated():
        return None
    text = config.chat_template or "{"
    template = None if "{" in text or "\n" in text else Path(text)  # as load_tokenizer tells a path from a template
    options = {name: value for name, value in as_json(config).items() if name not in _UNREAD}
    prompts = {name: [[m.as_dict() for m in task.prompt] for task in some] for name, some in tasks.items()}
    known = (
        options,
        [ranks.world, ranks.local, ranks.per_gpu],
        prompts,
        _timestamps(path for path in model.iterdir() if path.is_file()),
        _timestamps([template] if template is not None and template.is_file() else []),
        _timestamps(Path(tandem.__file__).parent.rglob("*.py")),
        [_version(name) for name in _LIBRARIES],
    )
    key = hashlib.sha256(msgspec.json.encode(known, enc_hook=str)).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "tandem" / "check" / f"{key[:32]}.json"


def read(path: Path | None) -> ModelFigures | None:
    """The cached figures; None if there are none, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelFigures) if path else None
    except (OSError, msgspec.DecodeError):
        return None


def write(path: Path | None, figures: ModelFigures) -> None:
    """Keep it; a disk that cannot is no fault of the recipe."""
    if path is None:
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(msgspec.json.encode(figures))
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)


def _timestamps(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of each file."""
    stats = ((str(path.resolve()), path.stat()) for path in paths)
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
