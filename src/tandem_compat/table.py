"""Options of other systems: one row says what an option becomes here, and one reader takes what was written of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from tandem.types import Json

if TYPE_CHECKING:
    from tandem.config.tree import Problems  # which loads yaml, and --help of the command lines need not

Takes = Literal[
    "text", "whole", "count", "number", "positive", "share", "truth", "flag", "texts", "numbers", "list", "mapping",
    "anything",
]  # fmt: skip

_TYPES: Mapping[str, Any] = {
    "text": str, "whole": int, "count": Annotated[int, Meta(ge=1)], "number": float,
    "positive": Annotated[float, Meta(gt=0, le=1.7e308)], "share": Annotated[float, Meta(ge=0, le=1)],
    "truth": bool, "flag": bool, "texts": list[str], "numbers": list[float], "list": list, "mapping": dict,
    "anything": Any,
}  # fmt: skip
NOTHING: tuple[Json, ...] = (False, "", "false", [], {})
"""Values of an option that ask for nothing."""
NO_USE = "Tandem has no use for it"


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option of another system. Of ``becomes``, ``idle`` and ``refused`` exactly one is set."""

    name: str
    """Its name there."""
    takes: Takes
    """Type of its value; ``texts`` and ``numbers`` are several words of a command line, a ``flag`` is none."""
    becomes: str = ""
    """What it is in a recipe."""
    default: Json = None
    """Its value where it is left out; of an idle or refused one, the value that asks for nothing."""
    also: tuple[str, ...] = ()
    """Older names."""
    _: KW_ONLY
    path: str = ""
    """The option of a recipe that its value is handed on to; empty: rules say what becomes of it."""
    idle: str = ""
    """Why it changes nothing here; a note says so where it is set."""
    refused: str = ""
    """Why a value other than ``default`` and ``off`` is an error."""
    off: tuple[Any, ...] = ()
    """More values of an idle or refused one that ask for nothing."""
    choices: Collection[Json] = ()
    """Values that it may have; empty: any."""
    where: str = ""
    """The condition under which it counts, as "changes nothing without" has it; empty: it always does."""

    @property
    def help(self) -> str:
        """One line for --help."""
        if self.becomes:
            left_out = "" if self.default in (None, False) else f" Default: {self.default}."
            return f"{self.becomes[0].upper()}{self.becomes[1:]}.{left_out}"
        return f"Changes nothing: {self.idle}." if self.idle else f"Refused: {self.refused}."


becomes = ForeignOption
"""A row of an option that a recipe has, such as ``becomes("warmup_steps", "whole", "optimizer.warmup_steps", 0)``."""


def copied(name: str, takes: Takes, path: str, default: Json = None, *also: str, where: str = "") -> ForeignOption:
    """A row of an option whose value is one of the recipe's, as it is."""
    return becomes(name, takes, path, default, also, where=where, path=path)


def idle(name: str, takes: Takes, why: str, *also: str, where: str = "", off: tuple[Json, ...] = ()) -> ForeignOption:
    """A row of an option that changes nothing here."""
    return ForeignOption(name, takes, also=also, idle=why, where=where, off=off)


def unused(takes: Takes, names: str) -> tuple[ForeignOption, ...]:
    """Rows of options that only the other system has a use for."""
    return tuple(idle(name, takes, NO_USE, off=(*NOTHING, "auto", "none")) for name in names.split())


def refused(
    name: str, takes: Takes, why: str, default: Json = None, *also: str, off: tuple[Json, ...] | None = None
) -> ForeignOption:
    """A row of an option that would change the result and cannot be had, unless it is false or empty."""
    asks_nothing = off if off is not None else NOTHING if takes == "anything" else ()
    return ForeignOption(name, takes, default=default, also=also, refused=why, off=asks_nothing)


def by_name(*rows: ForeignOption) -> dict[str, ForeignOption]:
    """Rows as a table, by their names."""
    return {row.name: row for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Translation of another system's command line."""

    options: dict[str, Json]
    """The recipe."""
    notes: tuple[str, ...]
    """What a person should know of how it differs from the command line."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set before anything loads."""


class Reader:
    """Options that were set, by name, each checked against its row; mistakes and notes are gathered."""

    updates: ClassVar[str] = ""
    """The option that says how many updates a batch is for."""

    def __init__(self, table: Mapping[str, ForeignOption], problems: Problems, prefix: str = "") -> None:
        """Read nothing yet.

        Args:
            table: rows by name.
            problems: where mistakes go.
            prefix: what stands before a name in messages.
        """
        self.table = dict(table)
        self.problems = problems
        self.prefix = prefix
        self.values: dict[str, Json] = {}
        self.notes: list[str] = []
        self.recipe: dict[str, Any] = {}
        """What has been put so far."""

    @classmethod
    def of_command_line(cls, table: Mapping[str, ForeignOption], values: Mapping[str, Json]) -> Self:
        """The options of a command line: lists of words, or values; None and null leave one out.

        Raises:
            ConfigError: with every value of another type.
        """
        from tandem.config.tree import Problems  # only now: help need not wait for yaml

        reader = cls(table, Problems(), "--")
        for name, value in values.items():
            if isinstance(value, (list, tuple)):
                if list(value) not in (["None"], ["null"]):
                    reader.read_words(name, value)
            elif value is not None:
                reader.read(name, value)
        reader.problems.raise_if_any("the command line")
        return reader

    def __contains__(self, name: str) -> bool:
        """True if the option is set."""
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        """An option's value, or its default."""
        return self.values.get(name, self.table[name].default)

    def get(self, name: str, default: Any = None) -> Any:
        """An option's value, or ``default`` where it is left out."""
        return self.values.get(name, default)

    def wrong(self, name: str, message: str) -> None:
        """Note that an option cannot be obeyed."""
        self.problems.add(f"{self.prefix}{name}", message)

    def require(self, name: str, what: str) -> None:
        """Note that an option is missing, if it is; ``what`` it must be."""
        if not self[name]:
            self.wrong(name, f"it is missing: {what}")

    def note(self, name: str, message: str) -> None:
        """Note what a person should know of an option."""
        self.notes.append(f"{self.prefix}{name}: {message}")

    def nothing(self, name: str, why: str) -> None:
        """Note that an option changes nothing."""
        self.note(name, f"changes nothing: {why}")

    def put(self, path: str | tuple[str, ...], value: Json, *options: str) -> None:
        """Set an option of the recipe; mistakes in it are those of the first of these options that is set."""
        *words, last = path.split(".") if isinstance(path, str) else path
        branch = self.recipe
        for word in words:
            branch = branch.setdefault(word, {})
        branch[last] = value

    def copy(self, option: str, path: str) -> None:
        """Hand an option on as it is, if it is set."""
        if option in self:
            self.put(path, self[option], option)

    def per_step(self, updates: float) -> int:
        """Steps that are so many updates of the other system, which it calls steps."""
        return max(1, math.ceil(updates / self[self.updates])) if updates > 0 else 0

    def interval(self, name: str, steps: int) -> int:
        """Steps from one time to the next of what an option asks for: so many updates, or below 1 a share of all."""
        count: float = self[name] or 0
        if count < 0 or (count > 1 and not float(count).is_integer()):
            self.wrong(name, f"expected a number of steps, or a share of all below 1, got {count:g}")
            return 1
        return math.ceil(count * steps) if 0 < count < 1 else self.per_step(count)

    def read(self, name: str, value: Json) -> None:
        """Take a value that the option may have; another is a mistake."""
        row = self.table[name]
        try:
            msgspec.convert(value, _TYPES[row.takes])
        except msgspec.ValidationError as error:
            self.wrong(name, f"{error}: {shown(value)}")
            return
        if row.choices and value not in row.choices:
            choices = ", ".join(choice if isinstance(choice, str) else shown(choice) for choice in row.choices)
            self.wrong(name, f"there is no {shown(value)} here; choose from {choices}")
        else:
            self.values[name] = value

    def read_words(self, name: str, words: Sequence[str]) -> None:
        """Take the value that words of a command line stand for; others are a mistake."""
        try:
            self.read(name, _parsed(self.table[name].takes, words))
        except msgspec.MsgspecError as error:
            self.wrong(name, f"{error}: {' '.join(words)!r}")

    def settle_all(self, conditions: Mapping[str, bool]) -> None:
        """Refuse what would change the result and cannot be had, tell what changes nothing, and hand the rest on.

        Args:
            conditions: whether each condition that options count under holds, by its name; left out, it does.
        """
        for name, value in self.values.items():
            row = self.table[name]
            asks = value != row.default and value not in row.off
            if not conditions.get(row.where, True):
                self.note(name, f"changes nothing without {row.where}")
            elif row.refused and asks:
                self.wrong(name, f"it cannot be {shown(value)} here: {row.refused}; leave it out")
            elif row.idle and asks:
                self.nothing(name, row.idle)
        for name, row in self.table.items():
            if row.path and (name in self.values or row.default) and conditions.get(row.where, True):
                self.put(row.path, self[name], name)

    def raise_if_wrong(self) -> None:
        """Raise ConfigError with every mistake so far, if there is one."""
        self.problems.raise_if_any("the command line")

    def translated(self, environ: Mapping[str, str] | None = None) -> Translation:
        """What has been put, in the order of a recipe's options; ``environ`` is set before anything loads.

        Raises:
            ConfigError: with every mistake.
        """
        from tandem.config.loading import RunConfig

        self.raise_if_wrong()
        order = [option.name for option in fields(RunConfig)]
        options = dict(sorted(self.recipe.items(), key=lambda entry: order.index(entry[0])))
        return Translation(options=options, notes=tuple(dict.fromkeys(self.notes)), environ=environ or {})


def shown(value: Json) -> str:
    """A value as a file has it."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _parsed(takes: Takes, words: Sequence[str]) -> Json:
    """The value that words stand for; raises MsgspecError for others."""
    if takes in ("texts", "numbers"):
        return msgspec.convert(words, _TYPES[takes], strict=False)
    if takes == "mapping":
        return msgspec.json.decode(words[-1], type=dict)
    word = {"yes": "true", "no": "false"}.get(words[-1].lower(), words[-1]) if takes == "truth" else words[-1]
    return msgspec.convert(word, _TYPES[takes], strict=False)
