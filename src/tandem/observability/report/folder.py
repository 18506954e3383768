"""A run folder, read back. Whatever a killed run left is enough; what is missing is empty."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from tandem.errors import TandemError
from tandem.observability import json_lines, vitals
from tandem.types import Json

Row = dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Small files of a run folder; rollouts are read on demand."""

    path: Path
    """Where it is."""
    config_text: str
    """config.yaml as it is written; empty if there is none."""
    config: Row
    """config.yaml as values; empty if there is none or it is not YAML."""
    metrics: list[Row]
    """Rows of metrics.jsonl by step."""
    events: list[Row]
    """Rows of events.jsonl, oldest first."""
    evaluations: list[Row]
    """Rows of eval.jsonl by step, the last one of each environment and step."""
    rollout_steps: list[int]
    """Steps whose rollouts are kept, ascending."""
    process: Literal["", "alive", "gone"] = ""
    """The run's process, by its sign of life: it runs, it ended without a word, or nothing is known of it."""

    @property
    def name(self) -> str:
        """The run's name: the folder's."""
        return self.path.name

    def rollouts(self, step: int) -> list[Row]:
        """The rollouts that a step trained on."""
        return list(json_lines.read(self.rollout_file(step)))

    def rollout_file(self, step: int) -> Path:
        """Where the rollouts of a step are."""
        return self.path / "rollouts" / f"{step:06d}.jsonl"


def load(path: Path) -> RunFolder:
    """Read a run folder.

    Raises:
        TandemError: there is none at this path.
    """
    path = Path(path).resolve()
    config = path / "config.yaml"
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "events.jsonl")):
        raise TandemError(f"{path} is not a run folder, which has a config.yaml; give one such as runs/NAME")
    text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    evaluations = {(row.get("env", ""), row["step"]): row for row in _with_step(path / "eval.jsonl")}
    metrics = {row["step"]: row for row in _with_step(path / "metrics.jsonl") if isinstance(row.get("metrics"), dict)}
    return RunFolder(
        path=path,
        process=vitals.process(path),
        config_text=text,
        config=_values(text),
        metrics=[metrics[step] for step in sorted(metrics)],
        events=list(json_lines.read(path / "events.jsonl")),
        evaluations=sorted(evaluations.values(), key=lambda row: row["step"]),
        rollout_steps=sorted(
            int(file.stem) for file in path.glob("rollouts/*.jsonl") if file.stem.isdecimal() and len(file.stem) >= 6
        ),
    )


def _with_step(path: Path) -> list[Row]:
    return [row for row in json_lines.read(path) if isinstance(row.get("step"), int)]


def _values(text: str) -> Row:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # the page still shows the text
    return values if isinstance(values, dict) else {}
