"""ms-swift's completions.jsonl, written into a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsFile(MetricsLogger):
    """Write completions.jsonl into the run's folder: a line for each step, with a list for each column."""

    def open(self, info: RunInfo) -> Writer:
        """Lines of steps after ``resumed_step`` are dropped: that future did not happen."""
        return _CompletionsWriter(info)


class _CompletionsWriter(Writer):
    def __init__(self, info: RunInfo) -> None:
        from tandem.observability import json_lines

        self._folder = info.folder
        self._model, self._template = info.config["model"], info.config.get("chat_template")
        self._tokenizer: Any = None
        path = info.folder / "completions.jsonl"
        rows = [row for row in json_lines.read(path) if int(row["step"][0]) <= info.resumed_step]
        if path.exists():
            json_lines.replace(path, rows, durable=True)
        self._lines = json_lines.JsonLinesFile(path)
        self._written = int(rows[-1]["step"][0]) if rows else 0
        self._reached = info.resumed_step

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        # A run writes the rollouts of a step while it samples the next, and has them all before it closes its loggers.
        self._reached = step
        self._write_until(step - 1)

    def _write_until(self, step: int) -> None:
        """Add lines of steps up to this one; a killed run's last may be lacking."""
        for later in range(self._written + 1, step + 1):
            self._append(later)
            self._written = later

    def _append(self, step: int) -> None:
        from tandem.observability import json_lines

        rows = list(json_lines.read(self._folder / "rollouts" / f"{step:06d}.jsonl"))
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
