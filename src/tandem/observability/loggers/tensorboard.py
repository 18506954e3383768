"""TensorBoard event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer, completion_rows, library
from tandem.types import Json

FLUSH_SECONDS = 10
"""Numbers are on disk after at most this many seconds."""
_WRITER = "torch.utils.tensorboard"
"""torch's writer, which needs the tensorboard package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensorboard(MetricsLogger):
    """Write TensorBoard event files; look at them with ``tensorboard --logdir runs``."""

    def check(self) -> None:
        """See that tensorboard can be imported."""
        library("tensorboard.summary.writer.event_file_writer", "tensorboard")

    def open(self, info: RunInfo) -> Writer:
        """Open a new event file; after a resume TensorBoard forgets what came after the step it starts from."""
        self.check()
        folder = info.folder / "tensorboard"
        resumes = any(folder.glob("events.out.tfevents.*"))
        events = library(_WRITER, "tensorboard").SummaryWriter(
            str(folder), purge_step=info.resumed_step + 1 if resumes else None, flush_secs=FLUSH_SECONDS
        )
        if not resumes:
            recipe = msgspec.json.format(msgspec.json.encode(info.config, enc_hook=str), indent=2)
            events.add_text("recipe", _block(recipe.decode()), 0)
        return _TensorboardWriter(events)


class _TensorboardWriter(Writer):
    def __init__(self, events: Any) -> None:
        self._events = events

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        if name == "completions":
            rows = completion_rows(fields)
            pages = ("\n\n".join(f"**{column}**\n\n{_block(value)}" for column, value in row.items()) for row in rows)
            text = "\n\n---\n\n".join(pages).encode("utf-8", "replace").decode()
            self._events.add_text("completions", text, fields["step"])

    def close(self) -> None:
        self._events.close()


def _block(value: Json) -> str:
    """A value as a code block in Markdown: indented, so that nothing the model wrote is markup."""
    return "\n".join(f"    {line}" for line in str(value).splitlines() or [""])
