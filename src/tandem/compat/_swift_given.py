"""A command line of ms-swift's, each word of it checked against the table of its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.compat._swift_arguments import Argument
from tandem.config.tree import Problems
from tandem.types import Json

_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_WANTED = {
    "whole": "a whole number",
    "number": "a number",
    "truth": "true or false",
    "numbers": "numbers",
    "mapping": "a JSON mapping",
}


class Given:
    """What was given, by name; an argument that was left out, or is None, has its default."""

    def __init__(self, table: Sequence[Argument], words: Mapping[str, Sequence[str]], problems: Problems) -> None:
        """Read the words.

        Args:
            table: every argument of the command.
            words: those that were given, by name.
            problems: where mistakes go.
        """
        self.problems = problems
        self._table = {argument.name: argument for argument in table}
        self._values: dict[str, Json] = {}
        self._notes: list[str] = []
        for name, said in words.items():
            if list(said) not in (["None"], ["null"]):
                self._read(self._table[name], said)

    def __getitem__(self, name: str) -> Any:
        """An argument's value, or its default."""
        return self._values.get(name, self._table[name].default)

    def __contains__(self, name: str) -> bool:
        """True if it was given."""
        return name in self._values

    @property
    def values(self) -> dict[str, Json]:
        """What was given, by name."""
        return dict(self._values)

    def wrong(self, name: str, message: str) -> None:
        """Note that an argument cannot be obeyed."""
        self.problems.add(f"--{name}", message)

    def note(self, name: str, message: str) -> None:
        """Note what a person should know of an argument."""
        self._notes.append(f"--{name}: {message}")

    def only(self, name: str, choices: Mapping[str, Any]) -> Any:
        """What one of several texts stands for; None if it is none of them, which is a mistake."""
        if self[name] not in choices:
            self.wrong(name, f"there is no {self[name]!r} here; choose from {', '.join(filter(None, choices))}")
            return None
        return choices[self[name]]

    def positive(self, *names: str) -> bool:
        """True if numbers are above 0; others are mistakes."""
        for name in names:
            if self[name] is not None and self[name] <= 0:
                self.wrong(name, f"it must be above 0, not {self[name]}")
        return all(self[name] is None or self[name] > 0 for name in names)

    def settle(self, places: Mapping[str, str]) -> list[str]:
        """Refuse what would change the result and cannot be had; returns what to tell of the rest.

        Args:
            places: by the name of what arguments belong to, why they change nothing; empty where they count.
        """
        for name, value in self._values.items():
            argument = self._table[name]
            if argument.where and (why := places[argument.where]):
                self.note(name, f"changes nothing {why}")
            elif argument.refused and value != argument.default:
                self.wrong(name, f"refused: {argument.refused}")
            elif argument.idle and value != argument.default:
                self.note(name, f"changes nothing: {argument.idle}")
        return self._notes

    def _read(self, argument: Argument, said: Sequence[str]) -> None:
        try:
            self._values[argument.name] = _value(argument, said)
        except ValueError:
            self.wrong(argument.name, f"it takes {_WANTED[argument.takes]}, not {' '.join(said)!r}")


def _value(argument: Argument, said: Sequence[str]) -> Json:
    """The value that words stand for; raises ValueError for others."""
    match argument.takes:
        case "texts":
            return list(said)
        case "numbers":
            return [float(word) for word in said]
        case "whole":
            return int(said[-1])
        case "number":
            return float(said[-1])
        case "truth":
            if said[-1].lower() not in _TRUTH:
                raise ValueError
            return _TRUTH[said[-1].lower()]
        case "mapping":
            if not isinstance(found := json.loads(said[-1]), dict):
                raise ValueError
            return found
        case _:
            return said[-1]
