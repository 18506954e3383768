"""The run folder's own record: metrics.jsonl, eval.jsonl and events.jsonl. Always on; everything else reads it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.observability.json_lines import JsonLinesFile, rewind
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(MetricsLogger):
    """Write metrics.jsonl, eval.jsonl and events.jsonl into the run folder; on whether listed or not."""

    def open(self, info: RunInfo) -> Writer:
        """Open for appending. Rows of steps after ``resumed_step`` are dropped: that future did not happen.

        events.jsonl keeps all of its history.
        """
        info.folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "eval.jsonl"):
            rewind(info.folder / name, info.resumed_step)
        return _JsonlWriter(info.folder)


class _JsonlWriter:
    def __init__(self, folder: Path) -> None:
        self._metrics = JsonLinesFile(folder / "metrics.jsonl")
        self._evaluations = JsonLinesFile(folder / "eval.jsonl")
        self._events = JsonLinesFile(folder / "events.jsonl")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._metrics.append({"step": step, "time": time.time(), "metrics": scalars})

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        self._evaluations.append({"step": step, "time": time.time(), **record})

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        self._events.append({"time": time.time(), "event": name, **fields})

    def close(self) -> None:
        for lines in (self._metrics, self._evaluations, self._events):
            lines.close()
