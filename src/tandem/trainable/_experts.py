"""Stacked experts that compute with other weights than their parameter, for the length of a forward pass."""

from __future__ import annotations

from typing import Any


def read_live(experts: Any, name: str) -> None:
    """Have a module of experts read ``live[name]``, where that is, instead of its parameter of this name.

    By a property of a class of its own: the parameter stays where it is, as what is saved, moved and published.
    """
    if not hasattr(experts, "live"):
        experts.__class__ = type(type(experts).__name__, (type(experts),), {})
        experts.live = {}
    setattr(type(experts), name, property(lambda self: self.live.get(name, self._parameters[name])))
