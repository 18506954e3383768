"""torch, aiohttp and asyncio, loaded when first used.

A part's options are read, listed and refused without the first two, and a grading process of plain functions starts in
half the time without the last. Parts import them from here, and torch's types for their annotations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio as asyncio

    import aiohttp as aiohttp
    import torch as torch
    from torch import Tensor as Tensor
    from torch.nn import Parameter as Parameter
else:

    class _Lazy:
        """Stands for a module until an attribute of it is read."""

        def __init__(self, name: str):
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    aiohttp, asyncio, torch = map(_Lazy, ("aiohttp", "asyncio", "torch"))
    Tensor = Parameter = Any
