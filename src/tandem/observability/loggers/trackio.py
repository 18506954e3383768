"""Trackio: Hugging Face's tracker, local or on a Space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.observability.loggers.base import MetricsLogger, RunInfo, TrackerWriter, Writer, completion_rows, library
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Trackio(MetricsLogger):
    """Log numbers with Trackio; look at them with ``trackio show``. A resumed run continues the same curve."""

    project: str = "tandem"
    """Project of the run."""
    space: str | None = None
    """``owner/name`` of the Hugging Face Space that keeps the numbers; None keeps them on this machine."""
    group: str | None = None
    """Group of runs it belongs to."""

    def check(self) -> None:
        """See that trackio can be imported."""
        library("trackio", "trackio")

    def open(self, info: RunInfo) -> Writer:
        """Start the run, or continue it under the name kept in the run folder's ``trackio.id``."""
        trackio = library("trackio", "trackio")
        id_file = info.folder / "trackio.id"
        earlier = id_file.read_text().strip() if id_file.exists() else ""  # a full disk leaves it empty
        name = earlier or info.name
        run = trackio.init(
            project=self.project,
            name=name,
            group=self.group,
            space_id=self.space,
            config=dict(info.config),
            resume="allow" if earlier else "never",
            embed=False,
        )
        id_file.write_text(name + "\n")
        return _TrackioWriter(run, trackio)


class _TrackioWriter(TrackerWriter):
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        if name == "completions":
            table = self._library.Table(data=completion_rows(fields))
            self._run.log({"completions": table}, step=fields["step"])
