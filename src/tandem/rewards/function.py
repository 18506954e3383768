"""Reward functions by import path, called as TRL and Axolotl call them."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import ClassVar, Literal

from tandem.errors import ConfigError
from tandem.importing import importing
from tandem.rewards.grading.calls import Called, FunctionReward, plain


@dataclass(frozen=True, kw_only=True)
class Function(FunctionReward):
    """What ``f(completions, **columns)`` returns, one number or None per sibling; or ``f(rollout)``; or async."""

    full_marks: ClassVar[None] = None

    path: str
    """pkg.module.fn or pkg.module:fn, found from the recipe's folder and the working directory; a class is called
    without arguments, and what it makes is the function."""
    completions: Literal["messages", "text"] = "messages"
    """What a completion (and a prompt) is to it: a list of messages with role and content, or text."""

    def __post_init__(self) -> None:
        module, _, name = self.path.replace(":", ".").rpartition(".")
        if not module or not name:
            raise ConfigError(f"path must be pkg.module.fn, got {self.path!r}")

    def called(self) -> Called:
        with importing():
            thing = pkgutil.resolve_name(self.path)
        if isinstance(thing, type):
            thing = thing()
        if not callable(thing):
            raise TypeError(f"it is a {type(thing).__name__}; expected f(rollout) or f(completions, **columns)")
        return plain(thing, text=self.completions == "text")
