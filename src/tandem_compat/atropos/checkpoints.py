"""A run's checkpoints under Atropos' names, and the file that describes its broadcasts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import CheckpointError, ConfigError
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json

log = logging.getLogger(f"tandem.{__name__}")

_NAMES = {"full": ("model", "step", "final_model"), "lora": ("adapter", "adapter_step", "final_adapter")}
"""By what was trained: its folder within a checkpoint, and Atropos' two names."""
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "*_config.json", "README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout(MetricsLogger):
    """Copy every checkpoint to a folder under the names that Atropos' trainer gives them, while the run goes on.

    ``step_N/`` and ``final_model/``, or ``adapter_step_N/`` and ``final_adapter/``, and ``tokenizer/``; with broadcast
    ``nccl_bridge_config.json``. Each is copied aside and renamed, so that what bears its name is whole. What has that
    name from another run is replaced.
    """

    save_path: str
    """Where they go."""

    def open(self, info: RunInfo) -> Writer:
        """Copies are made in a thread of their own.

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
        self._thread = ThreadPoolExecutor(1, "layout")
        self._copying: Future[None] | None = None

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        from tandem.transport.bridge import NCCL_FILE  # only now: it needs torch, and flags are read without

        if name == "published" and (self._run_folder / NCCL_FILE).is_file():  # by a group that may be formed anew
            _copy(self._run_folder / NCCL_FILE, self._save_path / NCCL_FILE)
        if name == "checkpoint_saved":
            self._finish()  # before the checkpoint that is being copied may be pruned
            weights = Path(str(fields["path"])) / self._inside
            self._copying = self._thread.submit(self._lay_out, fields["step"], weights)

    def close(self) -> None:
        try:
            self._finish()
        finally:
            self._thread.shutdown()

    def _lay_out(self, step: int, weights: Path) -> None:
        # An interval as long as the run is how a recipe says that the last step alone is saved.
        is_last, is_due = step == self._last, step % self._every == 0 and self._every < self._last
        if is_due or not is_last:
            _copy(weights, self._save_path / f"{self._step}_{step}")
        if is_last:
            _copy(weights, self._save_path / self._final)
        _copy(weights, self._save_path / "tokenizer", without_model=True)

    def _finish(self) -> None:
        """Wait for the copy under way; one that fails is told, and the next is made all the same."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            try:
                copying.result()
            except CheckpointError as error:
                log.warning("%s", error)


def _copy(source: Path, target: Path, *, without_model: bool = False) -> None:
    """Copy a file or a folder to its final name, whole or not at all; ``without_model`` leaves the tokenizer's files.

    Raises:
        CheckpointError: the disk refuses.
    """
    aside = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            shutil.copy2(source, aside)
        else:
            shutil.copytree(source, aside, ignore=_not_of_the_tokenizer if without_model else None)
            shutil.rmtree(target, ignore_errors=True)
        aside.replace(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        remedy = "free disk space, then copy it by: tandem export"
        raise CheckpointError(f"{source} cannot be copied to {target}: {error}; {remedy}") from error


def _not_of_the_tokenizer(folder: str, names: list[str]) -> set[str]:
    """Files beside the tokenizer's in a saved model or adapter; an ``ignore`` of ``shutil.copytree``."""
    return set(shutil.ignore_patterns(*_MODEL_FILES)(folder, names)) - {"tokenizer_config.json"}
