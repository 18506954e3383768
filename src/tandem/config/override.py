"""``loss.clip_high=0.3`` on the command line, laid over the tree of a recipe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.config.sources import spell_out, write_out_rewards
from tandem.config.tree import SHELL, Branch, Leaf, Problems, Tree, parse_override, within

_IMPORT_PATH = re.compile(r"((?:envs\.[\w-]+\.)?rewards)\.([\w.]+:\w+)(?:\.(.+))?$")
"""A reward that is named by where it is imported from, and an option of it."""


def apply(tree: Branch, cls: type, overrides: Sequence[str], problems: Problems) -> None:
    """Lay overrides over a recipe of ``cls``, later ones over earlier ones.

    Those of single rewards come last: they change what the environment has of its own, where the recipe names none.
    """
    values: dict[str, Tree] = {}
    for text in overrides:
        key, equals, written = text.partition("=")
        where = SHELL + key
        if not equals:
            problems.add(f"{SHELL}{text}", f"an override is written option=value, such as {text.strip('-')}=...")
        elif key.startswith("-"):
            problems.add(where, f"an override has no dashes; write {text.lstrip('-')}")
        elif key in values:
            problems.add(where, "given twice; remove one")
        elif (value := parse_override(written, where, problems)) is not None:
            values[key] = value
    spell_out(tree)
    paths = {key: _split(key) for key in values}
    singles = {key for key, path in paths.items() if _names_reward(path)}
    for key in sorted(values, key=lambda key: key in singles):
        if key in singles:
            spell_out(tree)
            write_out_rewards(tree, paths[key], SHELL + key)
        _lay(tree, cls, paths[key], values[key], SHELL + key, problems)
    spell_out(tree)


def _split(key: str) -> list[str]:
    """Path of an option; the name of a reward may be an import path, which has dots of its own."""
    if match := _IMPORT_PATH.match(key):
        return [*match[1].split("."), match[2], *([match[3]] if match[3] else [])]
    return key.split(".")


def _names_reward(path: list[str]) -> bool:
    """Whether a path leads to a single reward, of the recipe or of one of its environments."""
    within_entry = path[2:] if path[0] == "envs" else path
    return len(within_entry) > 1 and within_entry[0] == "rewards"


def _lay(tree: Branch, cls: type, path: list[str], value: Tree, where: str, problems: Problems) -> None:
    """Put a value where its path leads, through mappings that are written out or made as far as need be."""
    if (options := _single(cls, path)) is None:
        problems.add(where, f"{path[0]} is a list; give the whole of it, such as {path[0]}=[console]")
        return
    if path[-1] == "kind" and options[len(path) - 2 :][:1] == ["kind"] and isinstance(value, Leaf):
        path = path[:-1]
    branch = tree
    for depth, (key, option) in enumerate(zip(path, options, strict=False), start=1):
        inner = branch.entries.get(key)
        if option and isinstance(inner, Leaf) and inner.value is not None:
            inner = within(option, inner)
        if depth < len(path):
            if inner is None:
                inner = Branch(where=where)
            if not isinstance(inner, Branch):
                problems.add(where, f"{'.'.join(path[:depth])} is a single value at {inner.where}; it has no options")
                return
            branch.put(key, inner, branch.key_where.get(key, where))
            branch = inner
        elif isinstance(inner, Branch) and isinstance(value, Leaf) and _keeps(inner, option, value, cls, key):
            inner.put(str(option), value, where)
            branch.put(key, inner, branch.key_where[key])
        else:
            branch.put(key, value, where)


def _single(cls: type, path: list[str]) -> list[str] | None:
    """For each word of a path the option that a single value there is, empty if none; None within a list of parts."""
    fields = {field.name: field.metadata for field in dataclasses.fields(cls)}
    metadata: Mapping[str, Any] = fields.get(path[0], {})
    if metadata.get("many"):
        return [""] if len(path) == 1 else None
    if "entries" in metadata:
        below = _single(metadata["entries"], path[2:]) if len(path) > 2 else []
        return None if below is None else ["", "weight", *below]
    if metadata.get("weighted"):
        return ["", "weight", *[""] * len(path)]
    option = "kind" if "category" in metadata else metadata.get("shorthand", "")
    return [option, *[""] * len(path)]


def _keeps(branch: Branch, option: str, value: Leaf, cls: type, key: str) -> bool:
    """Whether a mapping keeps its other options beside a single value: with a weight, and with the kind that it has."""
    if option != "kind":
        return option == "weight"
    kind = branch.entries.get("kind")
    default = next((field.metadata.get("default") for field in dataclasses.fields(cls) if field.name == key), None)
    return (kind.value if isinstance(kind, Leaf) else default) == value.value
