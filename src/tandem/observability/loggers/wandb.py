"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.observability.loggers.base import MetricsLogger, RunInfo, TrackerWriter, Writer, completion_rows, library
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Wandb(MetricsLogger):
    """Send numbers to Weights & Biases. A resumed run continues the same page there."""

    project: str = "tandem"
    """Project of the run."""
    entity: str | None = None
    """User or team; None is the account's default."""
    group: str | None = None
    """Group of runs it belongs to."""
    tags: tuple[str, ...] = ()
    """Labels to find it by."""
    mode: Literal["online", "offline"] = "online"
    """offline: keep everything in the run folder, for ``wandb sync`` later."""

    def check(self) -> None:
        """See that wandb can be imported."""
        library("wandb", "wandb")

    def open(self, info: RunInfo) -> Writer:
        """Start the run, or continue it by the id kept in the run folder's ``wandb.id``."""
        wandb = library("wandb", "wandb")
        id_file = info.folder / "wandb.id"
        # A full disk leaves it empty.
        run_id = (id_file.read_text().strip() if id_file.exists() else "") or uuid.uuid4().hex[:12]
        run = wandb.init(
            id=run_id,
            resume="allow",
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=list(self.tags),
            mode=self.mode,
            name=info.name,
            config=dict(info.config),
            dir=str(info.folder),
        )
        id_file.write_text(run_id + "\n")
        # Its own step counter only ever rises, so what follows a resume from an earlier step would be lost:
        # ours is a metric like any other, and the axis of all of them.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return _WandbWriter(run, wandb)


class _WandbWriter(TrackerWriter):
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        if name == "alarm":
            text = f"step {fields['step']}: {fields['seen']}\n{fields['means']}\n{fields['change']}"
            self._run.alert(title=f"alarm {fields['alarm']}", text=text, level="WARN")
        elif name == "completions":
            rows = completion_rows(fields)
            table = self._library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._run.log({"step": fields["step"], "completions": table})
