"""The user's own code in a run: its source is kept in the run's folder, so that a change of it is seen."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.config.build import RewardSpec
from tandem.config.loading import RunConfig
from tandem.config.registry import SOURCES


def keep(config: RunConfig, folder: Path) -> None:
    """Keep the source of every module that the recipe names, as the run was begun with."""
    for copy, source in _files(config, folder).items():
        if not copy.is_file():
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(source.read_bytes())


def changes(config: RunConfig, folder: Path) -> list[str]:
    """Modules of the recipe whose source is not the one that the run was made with, in words."""
    copies = [(copy, source) for copy, source in _files(config, folder).items() if copy.is_file()]
    changed = [(copy, source) for copy, source in copies if copy.read_bytes() != source.read_bytes()]
    return [f"{source} is not what this run was trained with (see {copy})" for copy, source in changed]


def _files(config: RunConfig, folder: Path) -> dict[Path, Path]:
    """Source of each module, by where it is kept; a module without one, as in a notebook, has none."""
    files = {}
    for name in sorted(set(_modules(config))):
        source = inspect.getsourcefile(sys.modules[name]) if name in sys.modules else None
        if source is not None and Path(source).is_file():
            files[folder / SOURCES / f"{name}.py"] = Path(source)
    return files


def _modules(value: object) -> Iterator[str]:
    """Modules outside this package that a value's parts come from, in depth."""
    if isinstance(value, RewardSpec) and isinstance(value.reward, str):
        yield value.reward.partition(":")[0]
    elif dataclasses.is_dataclass(value):
        if not type(value).__module__.startswith("tandem."):
            yield type(value).__module__
        for field in dataclasses.fields(value):
            yield from _modules(getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _modules(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _modules(inner)
