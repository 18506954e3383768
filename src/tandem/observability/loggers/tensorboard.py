"""TensorBoard event files in the run folder. Needs the tensorboard package alone, neither torch nor TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.observability.loggers.base import COLUMNS, MetricsLogger, RunInfo, Writer, completion_rows, require
from tandem.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensorboard(MetricsLogger):
    """Write TensorBoard event files; look at them with ``tensorboard --logdir runs``."""

    folder: str = "tensorboard"
    """Where the event files go, relative to the run folder."""
    flush_seconds: int = 10
    """Numbers are on disk after at most this many seconds."""

    def check(self) -> None:
        """See that tensorboard can be imported."""
        require("tensorboard.summary.writer.event_file_writer", "tensorboard")

    def open(self, info: RunInfo) -> Writer:
        """Open a new event file; after a resume TensorBoard forgets what came after the step it starts from."""
        return _TensorboardWriter(info.folder / self.folder, info, self.flush_seconds)


class _TensorboardWriter:
    def __init__(self, folder: Path, info: RunInfo, flush_seconds: int) -> None:
        self._event = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        files = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        fresh = not any(folder.glob("events.out.tfevents.*"))
        self._file = files.EventFileWriter(str(folder), flush_secs=flush_seconds)
        if fresh:
            self._write_config(info)
        else:
            # A start mark tells TensorBoard to purge what an earlier file holds from this step on.
            mark = self._event.SessionLog(status=self._event.SessionLog.START)
            self._file.add_event(self._event.Event(wall_time=time.time(), step=info.resumed_step + 1, session_log=mark))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step, values)

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        self.write(step, scalars)
        self._file.flush()

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        if name == "alarm":
            text = f"**{fields['seen']}**\n\n{fields['means']}\n\n{fields['change']}"
            self._add(fields["step"], [self._text(f"alarms/{fields['alarm']}", text.encode())])
            self._file.flush()
        elif name == "completions":
            blocks = [
                "\n\n".join(f"**{column}**\n\n{_block(value)}" for column, value in zip(COLUMNS, row, strict=True))
                for row in completion_rows(fields)
            ]
            self._add(
                fields["step"], [self._text("completions", "\n\n---\n\n".join(blocks).encode("utf-8", "replace"))]
            )

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._file.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def _write_config(self, info: RunInfo) -> None:
        """The recipe, as a page of TensorBoard's text tab."""
        recipe = msgspec.json.format(msgspec.json.encode(info.config, enc_hook=str), indent=2)
        text = b"\n".join(b"    " + line for line in recipe.splitlines())  # indented: a code block in Markdown
        self._add(0, [self._text("recipe", text)])

    def _text(self, tag: str, markdown: bytes) -> Any:
        """A page of the text tab."""
        tensors = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        types = require("tensorboard.compat.proto.types_pb2", "tensorboard")
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        return self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=tensors.TensorProto(dtype=types.DT_STRING, string_val=[markdown]),
        )


def _block(value: Json) -> str:
    """A value as a code block in Markdown: indented, so that nothing the model wrote is markup."""
    return "\n".join(f"    {line}" for line in str(value).splitlines() or [""])
