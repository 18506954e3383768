"""Files of other systems that are read as recipes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tandem.config.tree import Branch, Problems, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """Translation of a file of another system."""

    tree: Branch
    """The recipe; every value knows where in the file it was written."""
    notes: tuple[str, ...] = ()
    """What a person should know of how it differs from the file."""


Dialect = Callable[[Branch, bool, Problems], Translated]
"""Given a file's options and whether it is read to serve an engine alone: what it comes to. Mistakes are added to the
problems."""

DIALECTS = {"base_model": "tandem.compat.axolotl"}
"""Modules with a ``translate``, by the option for ``model`` that tells their files: by name since ``compat`` stands
above whatever reads recipes, and is loaded where a file is of another system."""

NAMES = "tandem.compat.names"
"""Module with a ``meant``: what options of other systems are called here."""


def elsewhere(option: str, value: Tree, where: str) -> dict[str, str]:
    """Hint about an option that another system has, by the place it is written at; empty if none has it.

    Or of those in the mapping that it holds, as in ``actor_rollout_ref: {rollout: {n: 8}}``.
    """
    meant: Callable[[str], str | None] = importlib.import_module(NAMES).meant
    texts: dict[str, str] = {}
    if isinstance(value, Branch):
        for key, inner in value.entries.items():
            texts |= elsewhere(f"{option}.{key}", inner, value.key_where[key])
    if not texts and (itself := meant(option)) is not None:
        return {where: f"unknown option {option!r}; {itself}"}
    return texts


def translate(tree: Branch, serving: bool, problems: Problems) -> Translated:
    """The recipe that a file comes to; a recipe of Tandem's is one already."""
    for option, name in DIALECTS.items():
        if option in tree.entries and "model" not in tree.entries:
            dialect: Dialect = importlib.import_module(name).translate
            return dialect(tree, serving, problems)
    return Translated(tree=tree)
