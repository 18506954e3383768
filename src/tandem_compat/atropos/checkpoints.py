"""A run's checkpoints under Atropos' names, and the file that describes its broadcasts."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json

log = logging.getLogger(f"tandem.{__name__}")

_NAMES = {"full": ("model", "step", "final_model"), "lora": ("adapter", "adapter_step", "final_adapter")}
"""By what was trained: its folder within a checkpoint, and Atropos' two names."""
_MODEL_FILES = ("*.safetensors*", "config.json", "adapter_config.json", "generation_config.json", "README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout(MetricsLogger):
    """Give every checkpoint the name that Atropos' trainer gives it, in a folder, while the run goes on.

    ``step_N/`` and ``final_model/``, or ``adapter_step_N/`` and ``final_adapter/``, and ``tokenizer/``; with broadcast
    ``nccl_bridge_config.json``. Files are linked, or copied to another disk, aside and renamed, so that what bears its
    name is whole. What has that name from another run is replaced.
    """

    save_path: str
    """Where they go."""

    def open(self, info: RunInfo) -> Writer:
        """Nothing is written before the first checkpoint.

        Raises:
            ConfigError: what the run trains has no name in Atropos.
        """
        trainable = info.config["trainable"]
        kind = trainable["kind"] if isinstance(trainable, dict) else trainable
        if kind not in _NAMES:
            raise ConfigError(f"Atropos has no name for checkpoints of trainable: {kind}; it has: {', '.join(_NAMES)}")
        return _LayoutWriter(info, Path(self.save_path), *_NAMES[kind])


class _LayoutWriter(Writer):
    def __init__(self, info: RunInfo, save_path: Path, inside: str, step: str, final: str) -> None:
        self._run_folder = info.folder
        self._save_path = save_path
        self._inside, self._step, self._final = inside, step, final
        self._last, self._every = info.config["steps"], info.config["checkpoint"]["every"]

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        from tandem.transport.bridge import NCCL_FILE  # only now: it needs torch, and flags are read without

        if name == "published" and (self._run_folder / NCCL_FILE).is_file():  # by a group that may be formed anew
            self._lay_out(self._run_folder / NCCL_FILE, NCCL_FILE)
        if name == "checkpoint_saved":
            weights, step = Path(str(fields["path"])) / self._inside, fields["step"]
            # An interval as long as the run is how a recipe says that the last step alone is saved.
            is_last, is_due = step == self._last, step % self._every == 0 and self._every < self._last
            if is_due or not is_last:
                self._lay_out(weights, f"{self._step}_{step}")
            if is_last:
                self._lay_out(weights, self._final)
            self._lay_out(weights, "tokenizer", *_MODEL_FILES)

    def _lay_out(self, source: Path, name: str, *left_out: str) -> None:
        """Give a file or a folder its name, whole or not at all; a failure is told."""
        target = self._save_path / name
        aside = target.with_name(f".{name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            self._save_path.mkdir(parents=True, exist_ok=True)
            if source.is_file():
                shutil.copy2(source, aside)
            else:
                shutil.copytree(source, aside, ignore=shutil.ignore_patterns(*left_out), copy_function=_linked)
                shutil.rmtree(target, ignore_errors=True)
            aside.replace(target)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            log.warning("%s cannot be copied to %s: %s; free disk space, then: tandem export", source, target, error)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)
