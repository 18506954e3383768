"""``tandem clean``: the checkpoints of finished runs, but for the last of each, make room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tandem import machine
from tandem.errors import ConfigError, command
from tandem.observability import json_lines
from tandem.observability.report.summary import last_mark
from tandem.trainer import digests
from tandem.trainer.run_lock import RunLock


def clean(folder: Path, *, yes: bool) -> Iterator[str]:
    """Remove them, or without ``yes`` only list them; yields the lines to print.

    Args:
        folder: a run's folder, or one that holds runs.
        yes: remove them.

    Raises:
        ConfigError: there is no run, or one is being trained.
    """
    runs = [config.parent for place in ("config.yaml", "*/config.yaml") for config in sorted(folder.glob(place))]
    if not runs:
        raise ConfigError(f"{folder} is no run's folder and holds none; name one such as runs or runs/NAME")
    freed = 0
    for run in runs:
        old = list(digests.steps_in(run / "checkpoints").values())[:-1]
        half = list((run / "checkpoints").glob(".*.tmp"))
        if not old and not half:
            continue
        last = last_mark(list(json_lines.read(run / "events.jsonl")))
        if last is None or last["event"] != "run_done":
            yield f"{run}: kept, it is not finished ({command('show', run)})"
            continue
        size = sum(
            path.stat().st_size for checkpoint in (*old, *half) for path in checkpoint.rglob("*") if path.is_file()
        )
        freed += size
        steps = ", ".join(str(int(checkpoint.name)) for checkpoint in old)
        what = [*([f"checkpoints of steps {steps}"] if old else []), *(["halves of checkpoints"] if half else [])]
        yield f"{run}: {machine.readable(size)}, {' and '.join(what)}"
        if yes:
            _remove(run, old, half)
    total = f"{machine.readable(freed)} freed" if yes else f"{machine.readable(freed)} would be freed"
    yield total if yes or not freed else f"{total}; to remove them: {command('clean', folder, '--yes')}"


def _remove(run: Path, checkpoints: list[Path], half: list[Path]) -> None:
    """Each is renamed first, since half of a checkpoint must not bear its name; a removal that was killed left such."""
    with RunLock() as lock:
        lock.take(run)
        for leftover in half:
            shutil.rmtree(leftover)
        for checkpoint in checkpoints:
            shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.tmp")))
