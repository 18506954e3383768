"""Reading a message the lenient way: what can be understood is coerced, what cannot is told with its place.

This is the slow path. Messages that say exactly what they mean never come here; see ``wire``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import inspect

from tandem.errors import BrokerError

MOST_PROBLEMS = 20
"""Problems of one message that are told; looking ends there, so that a large wrong message costs little."""
MOST_ECHO = 2_000
"""Bytes of JSON of a wrong value that go back with its problem."""

Loc = tuple[str | int, ...]


class Problem(msgspec.Struct, omit_defaults=True):
    """One thing wrong with a message, in the form that Atropos' clients know."""

    type: str
    """Its kind, such as ``missing`` or ``int_parsing``."""
    loc: list[str | int]
    """Where: ``body``, then keys and places in lists."""
    msg: str
    """What was expected."""
    input: Any = msgspec.UNSET
    """What was found instead; left out if it is large."""
    ctx: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """What a parser said."""


class Malformed(BrokerError):
    """A message that cannot be accepted, with everything that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        first = problems[0]
        why = f": {first.ctx['error']}" if first.ctx else ""
        super().__init__(f"{'.'.join(map(str, first.loc))}: {first.msg}{why}")
        self.problems = problems


def refuse(kind: str, loc: Loc, msg: str, value: Any = msgspec.UNSET, why: str = "") -> Malformed:
    """One problem as an error to raise."""
    return Malformed([problem(kind, loc, msg, value, why)])


def problem(kind: str, loc: Loc, msg: str, value: Any = msgspec.UNSET, why: str = "") -> Problem:
    """A problem; the value found goes along if it is small."""
    ctx = {"error": why} if why else msgspec.UNSET
    return Problem(type=kind, loc=["body", *loc], msg=msg, input=_echo(value), ctx=ctx)


def coerce(value: Any, kind: Any, known: dict[Any, inspect.Type]) -> Any:
    """Make a decoded message what its type wants: "7", 7.0 and true pass as the int 7, 7 and 1; ints pass as floats.

    Args:
        value: decoded JSON or MessagePack.
        kind: the type of the message.
        known: a cache of what is known of types.

    Returns:
        Plain values that ``msgspec.convert`` takes as they are. Unknown fields are gone.

    Raises:
        Malformed: it cannot be.
    """
    found = known.get(kind)
    if found is None:
        found = known[kind] = inspect.type_info(kind)
    problems: list[Problem] = []
    try:
        made = _coerce(value, found, (), problems)
    except _Enough:
        made = None
    if problems:
        raise Malformed(problems)
    return made


class _Enough(Exception):
    """The list of problems is full."""


def _fail(problems: list[Problem], kind: str, loc: Loc, msg: str, value: Any) -> None:
    problems.append(problem(kind, loc, msg, value))
    if len(problems) >= MOST_PROBLEMS:
        raise _Enough


def _coerce(value: Any, wanted: inspect.Type, loc: Loc, problems: list[Problem]) -> Any:
    match wanted:
        case inspect.UnionType():
            return _union(value, wanted, loc, problems)
        case inspect.StructType():
            return _struct(value, wanted, loc, problems)
        case inspect.ListType():
            if not isinstance(value, list):
                return _fail(problems, "list_type", loc, "Input should be a valid list", value)
            item = wanted.item_type
            if _exact(value, item):
                return value
            return [_coerce(one, item, (*loc, place), problems) for place, one in enumerate(value)]
        case inspect.DictType():
            if not isinstance(value, dict):
                return _fail(problems, "dict_type", loc, "Input should be a valid dictionary", value)
            return value
        case inspect.IntType() | inspect.FloatType():
            return _number(value, wanted, loc, problems)
        case inspect.StrType():
            return _text(value, wanted, loc, problems)
        case _:
            return value


def _exact(values: list[Any], item: inspect.Type) -> bool:
    """True if a list of numbers needs no looking at one by one, which is what long lists are."""
    if isinstance(item, inspect.IntType):
        fit = set(map(type, values)) == {int}
    elif isinstance(item, inspect.FloatType):
        fit = set(map(type, values)) == {float} and all(map(math.isfinite, values))
    else:
        return False
    return fit and not any(_broken(one, item) for one in (min(values), max(values)))


def _union(value: Any, wanted: inspect.UnionType, loc: Loc, problems: list[Problem]) -> Any:
    """Unions here are a type or null."""
    if value is None and any(isinstance(one, inspect.NoneType) for one in wanted.types):
        return None
    (one,) = (one for one in wanted.types if not isinstance(one, inspect.NoneType))
    return _coerce(value, one, loc, problems)


def _struct(value: Any, wanted: inspect.StructType, loc: Loc, problems: list[Problem]) -> Any:
    if not isinstance(value, dict):
        msg = "Input should be a valid dictionary or object to extract fields from"
        return _fail(problems, "model_attributes_type", loc, msg, value)
    made = {}
    for field in wanted.fields:
        name = field.encode_name
        if name in value:
            made[name] = _coerce(value[name], field.type, (*loc, name), problems)
        elif field.required:
            _fail(problems, "missing", (*loc, name), "Field required", value)
    return made


def _text(value: Any, wanted: inspect.StrType, loc: Loc, problems: list[Problem]) -> Any:
    if not isinstance(value, str):
        return _fail(problems, "string_type", loc, "Input should be a valid string", value)
    most = wanted.max_length
    if most is not None and len(value) > most:
        return _fail(problems, "string_too_long", loc, f"String should have at most {most} characters", value)
    return value


def _number(value: Any, wanted: inspect.IntType | inspect.FloatType, loc: Loc, problems: list[Problem]) -> Any:
    reader: Callable[[Any], Any] = _int if isinstance(wanted, inspect.IntType) else _float
    try:
        made = reader(value)
    except _Unreadable as error:
        return _fail(problems, error.kind, loc, str(error), value)
    if broken := _broken(made, wanted):
        return _fail(problems, broken[0], loc, f"Input should be {broken[1]}", value)
    return made


def _broken(value: float, wanted: inspect.IntType | inspect.FloatType) -> tuple[str, str] | None:
    """The bound that a number breaks: its kind, and in words."""
    if wanted.ge is not None and value < wanted.ge:
        return "greater_than_equal", f"greater than or equal to {wanted.ge}"
    if wanted.le is not None and value > wanted.le:
        return "less_than_equal", f"less than or equal to {wanted.le}"
    if wanted.lt is not None and value >= wanted.lt:
        return "less_than", f"less than {wanted.lt}"
    return None


class _Unreadable(Exception):
    def __init__(self, kind: str, msg: str) -> None:
        super().__init__(msg)
        self.kind = kind


def _int(value: Any) -> int:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if value.is_integer():
            return int(value)
        raise _Unreadable("int_from_float", "Input should be a valid integer, got a number with a fractional part")
    if isinstance(value, str):
        try:
            return _int(float(value)) if "." in value else int(value)
        except (ValueError, OverflowError):
            msg = "Input should be a valid integer, unable to parse string as an integer"
            raise _Unreadable("int_parsing", msg) from None
    raise _Unreadable("int_type", "Input should be a valid integer")


def _float(value: Any) -> float:
    if not isinstance(value, int | float | str):
        raise _Unreadable("float_type", "Input should be a valid number")
    try:
        made = float(value)
    except OverflowError:
        made = math.inf
    except ValueError:
        msg = "Input should be a valid number, unable to parse string as a number"
        raise _Unreadable("float_parsing", msg) from None
    if not math.isfinite(made):
        raise _Unreadable("finite_number", "Input should be a finite number")
    return made


def _echo(value: Any) -> Any:
    """A value that may go back to its sender: small, and fit for JSON."""
    if value is msgspec.UNSET or (isinstance(value, list | dict | str) and len(value) > MOST_ECHO):
        return msgspec.UNSET
    try:
        return value if len(msgspec.json.encode(value)) <= MOST_ECHO else msgspec.UNSET
    except (ValueError, TypeError, OverflowError, RecursionError):
        return msgspec.UNSET
