"""Files of other systems that are read as recipes, by packages that Tandem finds as entry points."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from tandem.config.tree import Branch, Problems, Tree

Translated = tuple[Branch, Sequence[str]]
"""The recipe that a file of another system comes to, of which every value knows where in the file it was written; and
what a person should know of how it differs."""


def elsewhere(option: str, value: Tree, where: str) -> dict[str, str]:
    """Hint about an option that another system has, by the place it is written at; empty if none has it.

    Or of those in the mapping that it holds, as in ``actor_rollout_ref: {rollout: {n: 8}}``. ``tandem.foreign_options``
    are functions that say what an option is here, or None.
    """
    texts: dict[str, str] = {}
    if isinstance(value, Branch):
        for key, inner in value.entries.items():
            texts |= elsewhere(f"{option}.{key}", inner, value.key_where[key])
    itself = next(filter(None, (meant(option) for meant in _points("tandem.foreign_options").values())), None)
    return texts or ({where: f"unknown option {option!r}; {itself}"} if itself else {})


def translate(tree: Branch, serving: bool, problems: Problems) -> Translated:
    """The recipe that a file comes to; a recipe of Tandem's is one already.

    ``tandem.dialects`` are functions with these parameters, each named for the option for ``model`` that tells its
    files; ``serving`` is true where an engine alone is to be started.
    """
    dialects = {} if "model" in tree.entries else _points("tandem.dialects")
    read = next((dialect for option, dialect in dialects.items() if option in tree.entries), None)
    translated: Translated = read(tree, serving, problems) if read else (tree, ())
    return translated


@cache
def _points(group: str) -> dict[str, Any]:
    return {point.name: point.load() for point in entry_points(group=group)}
