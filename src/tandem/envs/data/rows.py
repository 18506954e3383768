"""Rows of a data set with the place each came from: a local JSONL, CSV or Parquet file, or the hub."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from tandem import clone, hub, types
from tandem.envs.base import Split
from tandem.envs.data.split import split_of
from tandem.errors import EnvError, bounded, check_bounds
from tandem.importing import library
from tandem.types import Json

logger = logging.getLogger(__name__)

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MISSING = frozenset(("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"))
"""What stands for no number in a CSV file's column of numbers."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row and where it stands."""

    where: str
    """``path:line``, or the data set's name, split and row."""
    number: int
    """Line of the file, or row of the split, from 1."""
    columns: dict[str, Json]
    """Its values."""

    def text(self, column: str) -> str:
        """A column that must hold text; a number is written out.

        Raises:
            EnvError: there is no such column, or it holds something else.
        """
        value = self.value(column)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise EnvError(f"{self.where}: column {column!r} should hold text, got {value!r:.80}")
        return value

    def value(self, column: str) -> Json:
        """A column that must be there; ``outer.inner`` is one within another.

        Raises:
            EnvError: there is no such column; lists those there are.
        """
        try:
            return types.column(self.columns, column)
        except KeyError:
            raise EnvError(f"{self.where}: no column {column!r}; the row has: {', '.join(self.columns)}") from None


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Source of train and test rows."""

    path: str
    """A local .jsonl, .json, .csv, .tsv or .parquet file, or a data set's name on the hub."""
    subset: str | None = None
    """The hub's configuration name."""
    train_split: str = "train"
    """The hub's split to train on."""
    test_split: str | None = None
    """The hub's split to hold out; none: test_share of the train split."""
    test_path: str | None = None
    """A local file to hold out; none: test_share of path."""
    test_share: float = bounded(0.1, below=1)
    """Share of rows held out where no test set is named; equal prompts (with a transform: equal rows) stay together."""
    max_rows: int | None = bounded(None, least=1)
    """Rows that are read, the first of them, before some are held out; none: all."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def is_local(self) -> bool:
        """True if the path means a file of this machine, whether or not it is there."""
        return Path(self.path).expanduser().exists() or _looks_local(self.path)

    @property
    def shared(self) -> bool:
        """True if both splits come out of the same rows."""
        return self.test_path is None and (self.is_local or self.test_split is None)

    def rows(self, split: Split, key: Callable[[DataRow], str]) -> Iterator[DataRow]:
        """Rows of a split; ``key`` gives the text whose hash divides shared rows.

        Raises:
            EnvError: they cannot be read; names the file and line.
        """
        if not self.shared:
            yield from self._all(split)
            return
        for row in self._all("train"):
            if split_of(key(row), self.test_share) == split:
                yield row

    def inert(self) -> Mapping[str, str]:
        """Options that change nothing, and why."""
        notes = {}
        if self.is_local:
            notes = dict.fromkeys(("subset", "train_split", "test_split"), f"{self.path} is a local file")
        if self.test_path is not None:
            notes["test_split"] = "test_path names the test set"
        if not self.shared:
            notes["test_share"] = "a test set is named"
        return notes

    def _all(self, split: Split) -> Iterator[DataRow]:
        name = self.path
        if split == "test" and self.test_path is not None:
            name, rows = self.test_path, read_file(self.test_path)
        elif self.is_local:
            rows = islice(read_file(self.path), self.max_rows)
        else:
            wanted = self.test_split if split == "test" and self.test_split is not None else self.train_split
            rows = islice(_read_hub(self.path, self.subset, wanted), self.max_rows)
        row = None
        for row in rows:
            yield row
        if row is None:
            raise EnvError(f"{name} is empty; expected at least one row")


def read_file(path: str) -> Iterator[DataRow]:
    """Rows of a local JSONL, JSON, CSV or Parquet file.

    Raises:
        EnvError: it is not there, not of a known kind, or a row is malformed.
    """
    file = Path(path).expanduser()
    if not file.exists():
        raise EnvError(f"there is no file {path}; relative paths start at {Path.cwd()}{clone.where(path)}")
    reader = _READERS.get(file.suffix.lower())
    if reader is None or file.is_dir():
        raise EnvError(f"{path} cannot be read; name one file that ends in {', '.join(_READERS)}")
    try:
        yield from reader(file)
    except OSError as error:
        raise EnvError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise EnvError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error


def _open(file: Path) -> TextIO:
    return file.open(encoding="utf-8-sig", newline="")


def _read_jsonl(file: Path) -> Iterator[DataRow]:
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                # Without its end, else what is missing there is missed on the next line.
                yield _json_row(_loaded(line.rstrip(), f"{file}:{number}"), f"{file}:{number}", number)


def _read_json(file: Path) -> Iterator[DataRow]:
    """Rows of a file that is one list of objects, or has one on each line."""
    with _open(file) as lines:
        text = lines.read()
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(file)
        return
    for number, columns in enumerate(_loaded(text, str(file)), 1):
        yield _json_row(columns, f"{file}: row {number}", number)


def _json_row(columns: Any, where: str, number: int) -> DataRow:
    if not isinstance(columns, dict):
        raise EnvError(f"{where}: each row must be one JSON object, got {columns!r:.80}")
    return DataRow(where, number, columns)


def _loaded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"{where}: not valid JSON: {error}; each row must be one JSON object") from error


def _read_csv(file: Path) -> Iterator[DataRow]:
    """Rows with columns of numbers as numbers, as ``datasets`` reads them: a column that has any other text is text."""
    csv.field_size_limit(sys.maxsize)  # of the whole process; by default no field is longer than 128 KiB
    rows: list[dict[str, str]] = []
    places: list[int] = []
    with _open(file) as lines:
        reader = csv.DictReader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    names = ", ".join(reader.fieldnames or ())
                    raise EnvError(f"{file}:{reader.line_num}: expected as many fields as the header has ({names})")
                rows.append(row)
                places.append(reader.line_num)
        except csv.Error as error:
            raise EnvError(f"{file}:{reader.line_num}: not valid CSV: {error}") from error
    columns = {name: _typed([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    for nth, line in enumerate(places):
        yield DataRow(f"{file}:{line}", line, {name: values[nth] for name, values in columns.items()})


def _typed(texts: Sequence[str]) -> Sequence[Json]:
    """Fields of a column as numbers, if all of them are."""
    plain = [text.strip(" ") for text in texts]
    filled = [text for text in plain if text not in _MISSING]
    if not filled or not all(map(_NUMBER.fullmatch, filled)):
        return texts
    if len(filled) == len(plain) and all(map(_WHOLE.fullmatch, filled)):
        return [int(text) for text in plain]
    return [None if text in _MISSING else float(text) for text in plain]


def _read_parquet(file: Path) -> Iterator[DataRow]:
    library("pyarrow", f"reading {file}", "data", EnvError)
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, columns in enumerate(rows, 1):
            yield DataRow(f"{file}: row {number}", number, _plain(columns))
    except pyarrow.ArrowException as error:
        raise EnvError(f"{file} is not a readable Parquet file: {_first_line(error)}") from error


_READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_hub(name: str, subset: str | None, split: str) -> Iterator[DataRow]:
    if away := hub.away():
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read when datasets is first imported: what is kept is found
    datasets = library("datasets", f"{name} is not a local file, and loading it from the hub", "data", EnvError)
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises anything from OSError to its own; the message carries it
        why = f"cannot be loaded: {type(error).__name__}: {_first_line(error)}"
        why = f"is not on this machine, and {away}" if away else why
        remedy = "check the name and the network, or set path to a local JSONL, CSV or Parquet file"
        what = f"data set {name!r} (subset {subset or 'default'}, split {split!r})"
        raise EnvError(f"{what} {why}; it is not a local file: {remedy}") from error
    for number, columns in enumerate(loaded, 1):
        yield DataRow(f"{name}[{split}] row {number}", number, _plain(columns))


def _plain(value: Any) -> Json:
    """The value as JSON would hold it; dates and the like as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _looks_local(path: str) -> bool:
    return Path(path).suffix.lower() in _READERS or path.startswith((".", "/", "~")) or path.count("/") > 1


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
