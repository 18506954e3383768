"""JSON-lines files that a killed process can always be picked up from."""

from __future__ import annotations

import json
import logging
import mmap
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from tandem.types import Json

logger = logging.getLogger(__name__)

SMALL = 1 << 20
"""Bytes of a file that is read through where rows at distances would do."""


def encode(row: Mapping[str, Json]) -> bytes:
    """One line of strict JSON, newline included; numbers that are not finite become null."""
    try:
        return _encoder.encode(row) + b"\n"
    except UnicodeEncodeError:
        # Half of a surrogate pair (data sets hold such) has no bytes; a question mark stands for it.
        text = json.dumps(msgspec.to_builtins(row, enc_hook=_plain), ensure_ascii=False)
        return _encoder.encode(json.loads(text.encode("utf-8", "replace"))) + b"\n"


def _plain(value: object) -> Json:
    """Numbers of other libraries as numbers, the rest (a path, an enum) as text: no log is lost over a type."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)


class _Metrics(TypedDict):
    step: int
    time: NotRequired[float]
    metrics: dict[str, float | None]


_SHAPES: Mapping[str, Any] = {
    "events.jsonl": msgspec.defstruct("Event", [("event", str), ("time", float)]),
    "eval.jsonl": msgspec.defstruct("Evaluation", [("step", int), ("mean", float | None, None)]),
}
"""What readers rely on in the rows of a run's files, which have more; rows of others are any object."""
_metrics: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Metrics)  # these rows are many, and have nothing else


def read(path: Path) -> Iterator[dict[str, Json]]:
    """Rows of a JSON-lines file, oldest first; nothing if there is no file.

    A torn last line (a killed writer) is skipped. So is whatever else is not a row of such a file, with one warning.
    """
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            yield from _decoded(path, file)
    except OSError as error:
        logger.warning("%s cannot be read (%s)", path, error.strerror)


def sample(path: Path, most: int, recent: int = 0) -> list[dict[str, Json]]:
    """Rows at about equal distances in a file, the first and the last included, and every one of the ``recent`` last.

    Of a large file nothing else is read.
    """
    if not path.exists() or path.stat().st_size < SMALL:
        return list(read(path))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = start = data.rfind(b"\n") + 1
        starts = {data.rfind(b"\n", 0, (end - 1) * i // (most - 1)) + 1 for i in range(most)}
        for _ in range(recent):
            start = data.rfind(b"\n", 0, max(0, start - 1)) + 1
            starts.add(start)
        return list(_decoded(path, (data[at : data.find(b"\n", at) + 1] for at in sorted(starts))))


def _decoded(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Json]]:
    faults: list[str] = []
    shape = _SHAPES.get(path.name, dict[str, Any])
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if path.name == "metrics.jsonl":
                row = _metrics.decode(line)
            else:
                row = msgspec.json.decode(line)
                msgspec.convert(row, shape)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if line.endswith(b"\n"):
                faults.append(f"line {number} is no row of it ({error})")
            continue
        yield row
    if faults:
        more = f", and {len(faults) - 1:,} more" if len(faults) > 1 else ""
        logger.warning("%s is damaged: %s%s; that is skipped", path, faults[0], more)


def replace(path: Path, rows: Iterable[Mapping[str, Json]], *, durable: bool = False) -> None:
    """Write a whole file aside and rename it, so that it exists complete or not at all.

    Args:
        path: what to write; its folder must exist.
        rows: one line each.
        durable: also wait until the disk has it, for what must survive a power cut.
    """
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("wb") as file:
            file.writelines(encode(row) for row in rows)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def rewind(path: Path, step: int) -> None:
    """Drop the rows of later steps and a torn last line."""
    if path.exists():
        rows = (row for row in read(path) if isinstance(row.get("step"), int) and row["step"] <= step)
        replace(path, rows, durable=True)


class JsonLinesFile:
    """A file that grows by whole lines: one system call each, so a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        """Open for appending; what a killed writer left of its last line is cut off first."""
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        if os.fstat(self._fd).st_size:
            with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as data:
                end = data.rfind(b"\n") + 1
            os.ftruncate(self._fd, end)

    def append(self, row: Mapping[str, Json]) -> None:
        """Add a row.

        Raises:
            OSError: it could not be written; the file is as it was before.
        """
        data = encode(row)
        size = os.fstat(self._fd).st_size
        try:
            if (written := os.write(self._fd, data)) != len(data):
                raise OSError(f"only {written} of {len(data)} bytes of a line fit into {self._path}: is the disk full?")
        except OSError:
            os.ftruncate(self._fd, size)  # a full disk takes part of a line; it must not glue to the next one
            raise

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)
