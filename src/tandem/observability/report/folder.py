"""A run folder, read back. Whatever a killed run left is enough; what is missing is empty."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml

from tandem.errors import TandemError
from tandem.observability import json_lines, vitals
from tandem.types import Json

Row = dict[str, Json]

FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "eval.jsonl", "dropped.jsonl", "rollouts")
"""What a run writes as it goes, and is read here or by the page."""
STARTS = ("run_started", "resumed")
ENDS = {"run_done": "finished", "interrupted": "interrupted", "run_failed": "failed", "stalled": "failed"}
WEIGHTY = re.compile(rb'"event": ?"(?:%s)"' % "|".join((*STARTS, *ENDS, "alarm", "alarm_over")).encode())
"""Lines of the events that a run is judged by."""
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


class FollowedRun:
    """A run folder that is looked at again and again: what was read of it stays read."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        """Follow a run folder.

        Args:
            path: the folder.
            most: steps and evaluations that are read, evenly chosen, and of events only beginnings, ends and alarms;
                None: all, and which rollouts there are.

        Raises:
            TandemError: there is none at this path.
        """
        self.path = Path(path).resolve()
        self._most = most
        if not any((self.path / name).exists() for name in ("config.yaml", "metrics.jsonl", "events.jsonl")):
            raise TandemError(f"{self.path} is not a run folder, which has a config.yaml; give one such as runs/NAME")
        self._metrics, self._evaluations = (
            json_lines.Tail(self.path / name) for name in ("metrics.jsonl", "eval.jsonl")
        )
        self._events = json_lines.Tail(self.path / "events.jsonl", *([] if most is None else [WEIGHTY]))
        self._seen: tuple[object, RunFolder] | None = None

    def state(self) -> dict[str, str]:
        """When each file was last written, and its size; they differ if there is something new in it."""
        paths = {name: self.path / name for name in FILES}
        return {
            name: f"{at.st_mtime_ns}-{at.st_size}" if path.exists() and (at := path.stat()) else ""
            for name, path in paths.items()
        }

    def look(self) -> RunFolder:
        """The folder as it is now; the same object where nothing has changed."""
        state = self.state(), vitals.process(self.path)
        if self._seen is None or self._seen[0] != state:
            self._seen = state, self._read(state[1])
        return self._seen[1]

    def _read(self, process: Literal["", "alive", "gone"]) -> RunFolder:
        path, config = self.path, self.path / "config.yaml"
        text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
        evaluations = {(row.get("env", ""), row["step"]): row for row in self._rows(self._evaluations, "eval.jsonl")}
        metrics = {row["step"]: row for row in self._rows(self._metrics, "metrics.jsonl")}
        rollouts = path.glob("rollouts/*.jsonl") if self._most is None else ()
        return RunFolder(
            path=path,
            process=process,
            config_text=text,
            config=_values(text),
            metrics=[metrics[step] for step in sorted(metrics)],
            events=self._events.look(),
            evaluations=sorted(evaluations.values(), key=lambda row: row["step"]),
            rollout_steps=sorted(int(at.stem) for at in rollouts if at.stem.isdecimal() and len(at.stem) >= 6),
        )

    def _rows(self, tail: json_lines.Tail, name: str) -> list[Row]:
        rows = tail.look() if self._most is None else json_lines.sample(self.path / name, self._most, RECENT)
        return [row for row in rows if isinstance(row.get("step"), int)]


def load(path: Path) -> RunFolder:
    """Read a run folder.

    Raises:
        TandemError: there is none at this path.
    """
    return FollowedRun(path).look()


@lru_cache(maxsize=256)
def _values(text: str) -> Row:
    try:
        values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # ten times as fast
    except yaml.YAMLError:
        return {}  # the page still shows the text
    return values if isinstance(values, dict) else {}
