"""Checkpoint digests: a hash of every file beside it, so that a resume reads what was written or is refused.

Without them a file of another step, or one that a disk gave back with other bits, would be another run in silence. A
digest is xxh3 of 128 bits, about as fast as memory is read: it finds damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import xxhash

from tandem.errors import command

NAME = "digests.json"
"""The file: a digest for each other file of the checkpoint, by its path within."""
_STEP = re.compile(r"[0-9]{6,}")


def steps_in(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in a run's ``checkpoints`` folder by step, oldest first; other names are let be."""
    paths = {int(path.name): path for path in folder.glob("*") if _STEP.fullmatch(path.name) and path.is_dir()}
    return {step: paths[step] for step in sorted(paths) if paths[step].name == f"{step:06d}"}


def of_files(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Digests of files by their path within the folder; raises OSError."""
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def write(folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write down the digest of every file that is in the folder now; raises OSError.

    Args:
        folder: the checkpoint's.
        known: digests of files that other ranks wrote and have read already, by their path within.
    """
    rest = [path for path in _files(folder) if path.relative_to(folder).as_posix() not in known]
    digests = {**known, **of_files(folder, rest)}
    (folder / NAME).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def damage(folder: Path) -> str:
    """Damage of a checkpoint's files, in words; empty where all are as they were written."""
    try:
        digests = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if not isinstance(digests, dict):
            return f"{folder / NAME} is damaged (it holds no digests)"
    except (OSError, ValueError) as error:
        return f"{folder / NAME} cannot be read ({error})"
    there = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    for name, digest in digests.items():
        if name not in there:
            return f"{folder / name} is missing"
        try:
            if _digest(there[name]) != digest:
                return f"{folder / name} is damaged (its digest is not the one it was written with)"
        except OSError as error:
            return f"{folder / name} cannot be read ({error})"
    unknown = [name for name in there if name.endswith(".safetensors") and name not in digests]
    return f"{folder / unknown[0]} is not of this checkpoint (it has no digest)" if unknown else ""


def remedy(damaged: Path) -> str:
    """Advice where a checkpoint cannot be used: resume from the newest older one that is whole, if any."""
    folder = damaged.parent
    run, newer = folder.parent, [damaged]
    steps = steps_in(folder)
    for path in [steps[step] for step in reversed(steps) if step < int(damaged.name)]:
        if not damage(path):
            gone = " ".join(shlex.quote(str(path)) for path in newer)
            again = f"rm -r {gone} && {command('train', run)}"
            return f"the newest whole checkpoint is that of step {int(path.name)}; to go on from it: {again}"
        newer.append(path)
    return f"no older checkpoint is whole; start anew with: {command('train', run / 'config.yaml', 'name=NEW')}"


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME]


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
