"""A run folder, read back. Whatever a killed run left is enough; what is missing is empty."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml

from tandem.errors import TandemError
from tandem.observability import json_lines, vitals
from tandem.types import Json

Row = dict[str, Json]

FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "eval.jsonl", "rollouts")
"""What a run writes as it goes, and is read here or by the page."""
STARTS = ("run_started", "resumed")
ENDS = {"run_done": "finished", "interrupted": "interrupted", "run_failed": "failed", "stalled": "failed"}
WEIGHTY = {*STARTS, *ENDS, "alarm", "alarm_over"}
"""Events that a run is judged by."""
RECENT = 20
"""Steps by which a run is judged as it is now."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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


State = tuple[str, ...]
"""What a run folder's files are like: it differs if there is something new in one of them."""


def state(path: Path) -> State:
    """When each of ``FILES`` was last written, and its size; then the state of the run's process."""
    files = [path / name for name in FILES]
    written = [f"{at.st_mtime_ns}-{at.st_size}" if file.exists() and (at := file.stat()) else "" for file in files]
    return (*written, vitals.process(path))


def load(path: Path, most: int | None = None) -> RunFolder:
    """Read a run folder.

    Args:
        path: the folder.
        most: steps and evaluations that are read, evenly chosen, and of events only beginnings, ends and alarms;
            None: all, and which rollouts there are.

    Raises:
        TandemError: there is none at this path.
    """
    path = Path(path).resolve()
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "events.jsonl")):
        raise TandemError(f"{path} is not a run folder, which has a config.yaml; give one such as runs/NAME")
    config = path / "config.yaml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    evaluations = {(row.get("env", ""), row["step"]): row for row in _rows(path / "eval.jsonl", most)}
    metrics = {row["step"]: row for row in _rows(path / "metrics.jsonl", most)}
    events = json_lines.read(path / "events.jsonl")
    rollouts = path.glob("rollouts/*.jsonl") if most is None else ()
    return RunFolder(
        path=path,
        process=vitals.process(path),
        config_text=text,
        config=_values(text),
        metrics=[metrics[step] for step in sorted(metrics)],
        events=[event for event in events if most is None or event["event"] in WEIGHTY],
        evaluations=sorted(evaluations.values(), key=lambda row: row["step"]),
        rollout_steps=sorted(int(at.stem) for at in rollouts if at.stem.isdecimal() and len(at.stem) >= 6),
    )


def _rows(path: Path, most: int | None) -> list[Row]:
    return list(json_lines.read(path)) if most is None else json_lines.sample(path, most, RECENT)


@lru_cache(maxsize=256)
def _values(text: str) -> Row:
    try:
        values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # ten times as fast
    except yaml.YAMLError:
        return {}  # the page still shows the text
    return values if isinstance(values, dict) else {}
