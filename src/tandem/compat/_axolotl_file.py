"""An Axolotl file as options that have the right type, each with the place where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.compat._axolotl_options import DATASET, GROUPS, TOP, TRL, VLLM, Option
from tandem.config.registry import did_you_mean
from tandem.config.tree import Branch, Items, Leaf, Problems, Tree, plain
from tandem.types import Json

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "number": ((int, float), "a number"),
    "whole": ((int,), "a whole number"),
    "truth": ((bool,), "true or false"),
    "text": ((str,), "text"),
    "list": ((list,), "a list"),
    "mapping": ((dict,), "a mapping"),
}


@dataclass(kw_only=True)
class File:
    """Options by path, such as ``trl.beta``; what is null, mistaken, idle or refused is not among them."""

    tree: Branch
    """As it was read."""
    problems: Problems
    """Where mistakes go."""
    values: dict[str, Json] = field(default_factory=dict)
    """By path."""
    places: dict[str, str] = field(default_factory=dict)
    """Where each option is written, idle and refused ones among them."""
    notes: list[str] = field(default_factory=list)
    """What a person should know."""

    def __post_init__(self) -> None:
        self._read("", self.tree, TOP)
        for group, options in (("trl", TRL), ("vllm", VLLM)):
            branch = self.tree.entries.get(group)
            if isinstance(branch, Branch):
                self._read(f"{group}.", branch, options)
        for name in ("datasets", "test_datasets"):
            entries = self.tree.entries.get(name)
            for number, entry in enumerate(entries.items if isinstance(entries, Items) else ()):
                if isinstance(entry, Branch):
                    self._read(f"{name}[{number}].", entry, DATASET)
                else:
                    self.problems.add(entry.where, f"{name}: each entry must be a mapping with path and type")

    def __contains__(self, path: str) -> bool:
        """True if the option is set."""
        return path in self.values

    def get(self, path: str, default: Any = None) -> Any:
        """An option's value, or the default where it is left out."""
        return self.values.get(path, default)

    def where(self, *paths: str) -> str:
        """Where the first of these options that is written is, or else the file and the name of the first."""
        written = next((self.places[path] for path in paths if path in self.places), None)
        return written or (f"{self.tree.where}: {paths[0]}" if paths else self.tree.where)

    def wrong(self, path: str, message: str) -> None:
        """Note a mistake."""
        place = self.places.get(path, self.tree.where)
        self.problems.add(place, f"{path}: {message}")

    def note(self, path: str, message: str) -> None:
        """Tell something of an option."""
        self.notes.append(f"{path}: {message}")

    def _read(self, prefix: str, branch: Branch, options: Mapping[str, Option]) -> None:
        for name, tree in branch.entries.items():
            path, place = prefix + name, branch.key_where[name]
            if isinstance(tree, Leaf) and tree.value is None:
                continue
            if name in options:
                self.places[path] = place
                self._take(path, tree, options[name])
            else:
                self.problems.add(place, f"{path} is no option of Axolotl's that Tandem knows{_meant(name, options)}")

    def _take(self, path: str, tree: Tree, option: Option) -> None:
        value = plain(tree)
        off = value in option.off
        if option.refused:
            if not off:
                self.wrong(path, f"it cannot be {_shown(value)} here: {option.refused}; leave it out")
        elif option.idle:
            if not off:
                self.note(path, f"changes nothing: {option.idle}")
        elif option.takes in _TYPES and not _fits(value, *_TYPES[option.takes][0]):
            self.wrong(path, f"expected {_TYPES[option.takes][1]}, got {_shown(value)}")
        else:
            self.values[path] = value


def _fits(value: Json, *types: type) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _shown(value: Json) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _meant(name: str, options: Mapping[str, Option]) -> str:
    """A hint at the option that was meant, which may stand in another group."""
    if hint := did_you_mean(name, options):
        return hint
    homes = [group for group, others in GROUPS.items() if name in others]
    return f"; it belongs {f'in {homes[0]}' if homes[0] else 'to the top level'}" if homes else "; leave it out"
