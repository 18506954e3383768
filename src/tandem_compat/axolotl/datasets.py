"""An Axolotl file's data sets as tasks: its transforms are called as Axolotl calls them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from tandem.envs.base import Environment, Split
from tandem.envs.data.rows import DataRow, DataSource
from tandem.envs.data.split import digest, some
from tandem.envs.dataset import Dataset, changed, imported
from tandem.errors import ConfigError, EnvError
from tandem.types import TEXT, Json, Message, Task

_HARMLESS = {"num_proc", "desc", "load_from_cache_file", "keep_in_memory", "cache_file_name", "writer_batch_size"}
"""Options of a data set's map that change no row."""

_EVERY = "__all__"
"""What a transform's remove_columns says for every column of the row."""

_SUFFIXES = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",)}
"""Names that files end in, by what Axolotl calls their kind: names that as a path stand for data_files."""

Change = Callable[[dict[str, Json]], dict[str, Json]]
"""A row's columns, changed."""


class TransformOptions(dict[str, Any]):
    """Options as Axolotl's transforms expect them: by key or attribute, at any depth; None where there is none."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        super().__init__({key: _opened(value) for key, value in plain.items()})

    def __missing__(self, key: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle, to learn what this is
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _opened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return TransformOptions(value)
    return [_opened(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class AxolotlDatasets(Environment):
    """The data sets of an Axolotl file, one after the other; a task is a row, changed by its set's transform."""

    name: ClassVar[str] = "axolotl"

    cfg: dict[str, Any] = field(default_factory=dict)
    """The whole file, which transforms are given; datasets, test_datasets and val_set_size are read here."""

    def __post_init__(self) -> None:
        if not self.cfg.get("datasets"):
            raise ConfigError("cfg.datasets must be a list of data sets, each with path and type")
        for entry in [*self.cfg["datasets"], *(self.cfg.get("test_datasets") or [])]:
            _files(entry)

    def tasks(self, split: Split) -> Sequence[Task]:
        rows: list[DataRow] = []
        for number, (entry, raw) in enumerate(self._sets(split)):
            if change := _transform(self.cfg, entry, number):
                raw = [new for row in raw if (new := changed(row, change, entry["type"]))]
            rows += raw
        part = _TransformedRows(path="-", answer="")
        tasks = [
            replace(part.task(row, split), id=f"{split}/{number}", env=self.name)
            for number, row in enumerate(_even(rows), 1)
        ]
        return some(tasks, self.name, split, "add rows, or change test_datasets or val_set_size")

    def count(self, split: Split) -> int:
        """Rows of a split, as ``tasks`` would make tasks of, without calling any transform.

        Raises:
            EnvError: they cannot be read.
        """
        return sum(len(rows) for _, rows in self._sets(split))

    def check(self, task: Task) -> None:
        """Gold replies are not known: what an answer looks like, the rewards alone know."""
        return

    def _sets(self, split: Split) -> list[tuple[Mapping[str, Any], list[DataRow]]]:
        """Data sets of a split, each with its rows.

        Of val_set_size as many rows as Axolotl holds out, a share rounded up: those of the lowest hashes. Equal rows
        stay together.
        """
        held_out = self.cfg.get("test_datasets")
        entries = held_out if held_out and split == "test" else self.cfg["datasets"]
        sets = [(entry, _rows(entry)) for entry in entries]
        if held_out:
            return [(entry, _even(rows)) for entry, rows in sets]
        hashes = [[digest(repr(sorted(row.columns.items()))) for row in rows] for _, rows in sets]
        last = self._last_held_out(sorted(chain.from_iterable(hashes)))
        return [
            (entry, [row for row, key in zip(_even(rows), keys, strict=True) if (key <= last) == (split == "test")])
            for (entry, rows), keys in zip(sets, hashes, strict=True)
        ]

    def _last_held_out(self, hashes: Sequence[str]) -> str:
        """Highest hash of the rows that val_set_size holds out; empty if it holds out none."""
        size = max(0, self.cfg.get("val_set_size") or 0)
        count = math.ceil(size * len(hashes)) if size < 1 else int(size)
        if count >= len(hashes):
            raise EnvError(f"val_set_size: {count} of {len(hashes)} rows held out leave none to train on")
        return hashes[count - 1] if count else ""


@dataclass(frozen=True, kw_only=True)
class _TransformedRows(Dataset):
    """Makes a row with a ``prompt`` a task: messages, or a text that the policy goes on with, as in TRL."""

    def task(self, row: DataRow, split: Split) -> Task:
        task = self._task(row, split)
        answer = row.columns.get("answer")
        if not isinstance(answer, str | int | float):
            return task
        # Rewards of Axolotl's documents ask for it by either name.
        return replace(task, answer=str(answer), meta={"answers": answer, **task.meta})

    def _prompt(self, row: DataRow) -> tuple[Message, ...]:
        if isinstance(row.value(self.prompt), list):
            return super()._prompt(row)
        return (Message(role=TEXT, content=row.text(self.prompt)),)


def _files(entry: Mapping[str, Any]) -> list[str]:
    """Paths of a data set's files, or its name on the hub.

    Raises:
        ConfigError: there is neither, or a part of a local file is asked for.
    """
    path: str = entry.get("path") or ""
    files = entry.get("data_files") or []
    listed = files if isinstance(files, list) else [files]
    if not all(isinstance(name, str) and name for name in (path, *listed)) or (path in _SUFFIXES and not listed):
        raise ConfigError("datasets: each entry needs a path: a local file, a name on the hub, or json and data_files")
    paths = (listed if path in _SUFFIXES else [str(Path(path) / name) for name in listed]) or [path]
    local = [file for file in paths if DataSource(path=file).is_local]
    if entry.get("split") not in (None, "train") and local:
        raise ConfigError(f"datasets: {paths[0]} is a local file and has no split {entry['split']}; leave split out")
    ds_type = entry.get("ds_type")
    if ds_type is not None and any(Path(file).suffix not in _SUFFIXES.get(ds_type, ()) for file in local):
        raise ConfigError(f"datasets: {paths[0]} is not read as ds_type {ds_type}; its name must end accordingly")
    kind = entry.get("type")
    if kind is not None and not (isinstance(kind, str) and "." in kind):
        raise ConfigError(f"datasets: type must be an import path such as rewards.prompt_transform, got {kind!r}")
    return paths


def _rows(entry: Mapping[str, Any]) -> list[DataRow]:
    """All rows of one data set."""
    subset, split = entry.get("name"), entry.get("split") or "train"
    sources = [DataSource(path=path, subset=subset, train_split=split, test_share=0.0) for path in _files(entry)]
    return [row for source in sources for row in source.rows("train", lambda row: row.where)]


def _even(rows: Sequence[DataRow]) -> list[DataRow]:
    """Rows that have the same columns, None where one lacks a column: Axolotl's are rows of a table."""
    columns = dict.fromkeys(name for row in rows for name in row.columns)
    return [replace(row, columns={**columns, **row.columns}) for row in rows]


def _transform(cfg: Mapping[str, Any], entry: Mapping[str, Any], number: int) -> Change | None:
    """The change that a data set's ``type`` makes; None if it has none.

    Raises:
        EnvError: it cannot be made.
    """
    if (path := entry.get("type")) is None:
        return None
    function = imported("datasets: type", path)
    parameters = inspect.signature(function).parameters
    indexed = "dataset_idx" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    try:
        made = function(TransformOptions(cfg), **({"dataset_idx": number} if indexed else {}))
    except Exception as error:  # user code; the message carries it
        raise EnvError(f"datasets: {path} raised {type(error).__name__}: {error}") from error
    change, options = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not callable(change) or not isinstance(options, dict):
        raise EnvError(f"datasets: {path} returned {made!r}, expected a function of a row, and a mapping of options")
    if odd := set(options) - _HARMLESS - {"remove_columns"}:
        raise EnvError(f"datasets: {path} asks for {', '.join(sorted(odd))}; only remove_columns is understood")
    removed = options.get("remove_columns") or ()
    removed = {removed} if isinstance(removed, str) else set(removed)
    if "tokenizer" in inspect.signature(change).parameters:
        change = partial(change, tokenizer=tokenizer_of(str(cfg["base_model"])))
    return partial(_merge, change, removed)


def _merge(change: Callable[[dict[str, Json]], Any], removed: set[str], row: dict[str, Json]) -> dict[str, Json]:
    """Columns that stay, and over them what the function returns."""
    returned = change(dict(row))
    columns = {} if _EVERY in removed else {key: value for key, value in row.items() if key not in removed}
    return {**columns, **returned}


@cache
def tokenizer_of(model: str, chat_template: str = "") -> Any:
    """A model's tokenizer; without a template of the policy's its own is used."""
    from tandem.model.policy import load_tokenizer

    return load_tokenizer(model, chat_template=chat_template or None)
