"""reasoning-gym, of which only what one task needs is loaded.

``import reasoning_gym`` loads all of its hundred tasks, and with them sympy and matplotlib: 2 s of processor time, in
the run's process and in each grading process. Nearly every task is a file of its name in one of a dozen folders.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARY = "reasoning_gym"


@cache
def factory(task: str) -> Any:
    """The library's ``factory`` module, in which this task is registered if the library has it.

    Raises:
        ImportError: the library is not installed.
    """
    state = random.getstate()
    try:
        with contextlib.suppress(ImportError):  # of a task that needs others beside itself
            if LIBRARY not in sys.modules and (file := _file(task)) is not None:
                return _factory_of(file)
        importlib.import_module(LIBRARY)  # which registers every task
        return importlib.import_module(f"{LIBRARY}.factory")
    finally:
        random.setstate(state)  # some of its modules draw while they are imported


def _file(task: str) -> Path | None:
    """The file of a task; None where it is called otherwise, or there is no such task."""
    spec = importlib.util.find_spec(LIBRARY)
    places = (spec and spec.submodule_search_locations) or ()
    files = [file for place in places for file in sorted(Path(place).glob("*/*.py")) if file.stem == task]
    return files[0] if files else None


def _factory_of(file: Path) -> Any:
    """The factory with the tasks of one file, imported from packages without what their ``__init__`` imports."""
    family = f"{LIBRARY}.{file.parent.name}"
    try:
        for name, folder in ((LIBRARY, file.parents[1]), (family, file.parent)):
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(folder)]
        importlib.import_module(f"{family}.{file.stem}")
        return importlib.import_module(f"{LIBRARY}.factory")
    finally:  # what imports the library itself gets all of it
        for name in [name for name in sys.modules if name.partition(".")[0] == LIBRARY]:
            del sys.modules[name]
