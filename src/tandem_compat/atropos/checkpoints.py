"""A run's checkpoints under Atropos' names, and the file that describes its broadcasts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import CheckpointError, ConfigError
from tandem.observability.loggers.base import MetricsLogger, RunInfo, Writer
from tandem.types import Json


def lay_out(run_folder: Path, save_path: Path) -> list[Path]:
    """Copy a run's checkpoints to where Atropos' trainer would have written them; what is there already is kept.

    ``step_N/`` and ``final_model/``, or ``adapter_step_N/`` and ``final_adapter/``, and ``tokenizer/``; with broadcast
    ``nccl_bridge_config.json``. Each is copied aside and renamed, so that what bears its name is whole. What has that
    name from another run is replaced.

    Args:
        run_folder: the run's.
        save_path: made if it is not there.

    Returns:
        What was written, in order.

    Raises:
        CheckpointError: a checkpoint cannot be copied.
        ConfigError: what the run trains has no name in Atropos.
    """
    from tandem.observability.report.folder import load
    from tandem.trainer.digests import steps_in

    naming = _Naming.of(load(run_folder).config)
    folders = steps_in(run_folder / "checkpoints")
    written = [path for step in sorted(folders) for path in naming.place(step, folders[step], save_path)]
    written += naming.place_tokenizer(folders[max(folders)], save_path) if folders else []
    return [*written, *_place_bridge(run_folder, save_path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Naming:
    """What one run's checkpoints are called."""

    inside: str
    step: str
    final: str
    last: int
    every: int

    @classmethod
    def of(cls, config: Mapping[str, Json]) -> _Naming:
        """By a run's whole recipe.

        Raises:
            ConfigError: what it trains has no name in Atropos.
        """
        trainable = config["trainable"]
        kind = trainable["kind"] if isinstance(trainable, dict) else trainable
        if kind not in _NAMES:
            raise ConfigError(f"Atropos has no name for checkpoints of trainable: {kind}; it has: {', '.join(_NAMES)}")
        inside, step, final = _NAMES[kind]
        return cls(inside=inside, step=step, final=final, last=config["steps"], every=config["checkpoint"]["every"])

    def place(self, step: int, checkpoint: Path, save_path: Path) -> list[Path]:
        """Copy one checkpoint's weights; returns the folders that were written."""
        # An interval as long as the run is how a recipe says that the last step alone is saved.
        is_last, is_due = step == self.last, step % self.every == 0 and self.every < self.last
        names = [f"{self.step}_{step}"] if is_due or not is_last else []
        names += [self.final] if is_last else []
        source = checkpoint / self.inside
        return [path for name in names if (path := _place(source, save_path / name))]

    def place_tokenizer(self, checkpoint: Path, save_path: Path) -> list[Path]:
        """Copy the tokenizer out of a checkpoint; returns its folder if it was written."""
        path = _place(checkpoint / self.inside, save_path / "tokenizer", leave=_not_of_the_tokenizer)
        return [path] if path else []


_NAMES = {"full": ("model", "step", "final_model"), "lora": ("adapter", "adapter_step", "final_adapter")}
"""By what was trained: its folder within a checkpoint, and Atropos' two names."""

_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "*_config.json", "README.md")


def _not_of_the_tokenizer(folder: str, names: list[str]) -> set[str]:
    """Files beside the tokenizer's in a saved model or adapter; an ``ignore`` of ``shutil.copytree``."""
    ignored = shutil.ignore_patterns(*_MODEL_FILES)(folder, names)
    return set(ignored) - {"tokenizer_config.json"}


def _place_bridge(run_folder: Path, save_path: Path) -> list[Path]:
    """Copy the file of a run's process group, if it has one; returns the copy if it was written.

    Raises:
        CheckpointError: the disk refuses.
    """
    from tandem.transport.bridge import NCCL_FILE  # only now: it needs torch, and flags are read without

    source, target = run_folder / NCCL_FILE, save_path / NCCL_FILE
    aside = target.with_name(f".{target.name}.tmp")
    try:
        if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            return []
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, aside)
        aside.replace(target)
    except OSError as error:
        raise CheckpointError(
            f"{source} cannot be copied to {target}: {error}; free disk space or mend the folder, then copy it by hand"
        ) from error
    return [target]


def _place(source: Path, target: Path, leave: Callable[[str, list[str]], set[str]] | None = None) -> Path | None:
    """Copy a folder to its final name, unless it is there; returns where it was written, or None.

    Raises:
        CheckpointError: the disk refuses.
    """
    aside, old = (target.with_name(f".{target.name}.{what}") for what in ("tmp", "old"))
    try:
        if _files(source, leave) == (_files(target) if target.is_dir() else None):
            return None
        for leftover in (aside, old):
            shutil.rmtree(leftover, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, aside, ignore=leave)
        if target.exists():
            target.rename(old)
        aside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"{source} cannot be copied to {target}: {error}; free disk space or mend the folder, then copy it by hand "
            "or by: tandem export"
        ) from error
    return target


def _files(folder: Path, leave: Callable[[str, list[str]], set[str]] | None = None) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a flat folder; a copy has those of what it was copied from."""
    names = os.listdir(folder)
    left = leave(str(folder), names) if leave else set()
    stats = {name: (folder / name).stat() for name in names if name not in left}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout(MetricsLogger):
    """Copy every checkpoint to a folder under the names that Atropos' trainer gives them, while the run goes on."""

    save_path: str
    """Where step_N/, final_model/ and their like go, and nccl_bridge_config.json."""

    def open(self, info: RunInfo) -> Writer:
        """Copies are made in a thread of their own."""
        return _LayoutWriter(info, Path(self.save_path))


class _LayoutWriter:
    def __init__(self, info: RunInfo, save_path: Path) -> None:
        self._naming = _Naming.of(info.config)
        self._run_folder = info.folder
        self._save_path = save_path
        self._thread = ThreadPoolExecutor(1, "layout")
        self._copying: Future[None] | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        return

    def evaluation(self, step: int, record: Mapping[str, Json], scalars: Mapping[str, float]) -> None:
        return

    def event(self, name: str, fields: Mapping[str, Json]) -> None:
        if name == "published":  # through a group that may have been formed anew
            _place_bridge(self._run_folder, self._save_path)
        if name == "checkpoint_saved":
            self._finish()  # before the checkpoint that is being copied may be pruned
            checkpoint = Path(str(fields["path"]))
            self._copying = self._thread.submit(self._copy, fields["step"], checkpoint)

    def close(self) -> None:
        try:
            self._finish()
        finally:
            self._thread.shutdown()

    def _copy(self, step: int, checkpoint: Path) -> None:
        self._naming.place(step, checkpoint, self._save_path)
        self._naming.place_tokenizer(checkpoint, self._save_path)

    def _finish(self) -> None:
        """Wait for the copy under way; its error is this logger's."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()
