"""reasoning-gym, loaded without the drawing library that one of its hundred tasks brings.

Its game of life imports cellpylib, which imports matplotlib to draw what nobody here draws: half of the processor time
of ``import reasoning_gym``, in the run's process and in each grading process.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_DRAWING = (
    "matplotlib",
    "matplotlib.pyplot",
    "matplotlib.animation",
    "matplotlib.collections",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""Modules that cellpylib imports and does not use before it draws."""


def load() -> ModuleType:
    """The library.

    Raises:
        ImportError: it is not installed.
    """
    with contextlib.suppress(ImportError, AttributeError), _drawing_later():
        return importlib.import_module("reasoning_gym")
    return importlib.import_module("reasoning_gym")  # a version that asks the drawing library for more


@contextlib.contextmanager
def _drawing_later() -> Iterator[None]:
    """Have the drawing library stood in for while the block imports; whoever draws afterwards gets the real one."""
    if "reasoning_gym" in sys.modules or any(name in sys.modules for name in _DRAWING):
        yield
        return
    stand_ins = {name: _Later(name) for name in _DRAWING}
    stand_ins["mpl_toolkits.mplot3d"].Axes3D = None  # named by an import that is for its effect alone
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
            stand_in.ready = True


class _Later(ModuleType):
    """Stands for a module, and hands its attributes on once the real one may be imported."""

    ready = False
    Axes3D: Any

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, attribute: str) -> Any:
        if not self.ready:
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.__name__), attribute)
