"""ms-swift's completions.jsonl, written into a run's folder."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsFile(MetricsLogger):
    """Write completions.jsonl into the run's folder as it ends: a line for each step, with a list for each column."""

    def open(self, info: RunInfo) -> Writer:
        """Nothing is written yet."""
        return _CompletionsWriter(info)


class _CompletionsWriter(Writer):
    def __init__(self, info: RunInfo) -> None:
        self._info = info

    def close(self) -> None:
        from tandem.model.policy import load_tokenizer
        from tandem.observability import json_lines

        config, folder = self._info.config, self._info.folder
        tokenizer, lines = load_tokenizer(config["model"], chat_template=config.get("chat_template")), []
        for file in sorted((folder / "rollouts").glob("*.jsonl")):
            rows = list(json_lines.read(file))
            names = dict.fromkeys(name for row in rows for name in row["rewards"])
            columns: dict[str, list[Json]] = {
                "step": [str(int(file.stem))] * len(rows),
                "prompt": [tokenizer.decode(row["prompts"][0][1]) if row["prompts"] else "" for row in rows],
                "completion": [row["text"] for row in rows],
                **{name: [row["rewards"].get(name) for row in rows] for name in names},
                "advantages": [row["advantage"] for row in rows],
            }
            lines += [columns] if rows else []
        json_lines.replace(folder / "completions.jsonl", lines)
