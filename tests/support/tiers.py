"""Parametrisations and properties whose full size is for ``--long``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest


def examples(number: int) -> int:
    """Examples of a property that wants another number than 100: as many with ``--long``, else a part of them."""
    return max(1, number * hypothesis.settings().max_examples // 100)


def long_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test, marked ``long`` except those kept in the default tier."""
    values = list(values)
    if missing := [value for value in kept if value not in values]:
        raise ValueError(f"kept, but not among the parameters: {missing}")
    return [pytest.param(value, marks=[] if value in kept else [pytest.mark.long]) for value in values]
