"""Messages of the protocol as JSON, and what a client is told of one that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tandem.errors import BrokerError

T = TypeVar("T")
Place = tuple[str | int, ...]

_BYTE = re.compile(r"byte (\d+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_AT = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class Problem(msgspec.Struct):
    """One thing wrong with a message, in FastAPI's form, which Atropos' clients know."""

    type: str
    loc: list[str | int]
    msg: str


class Malformed(BrokerError):
    """A message that cannot be accepted."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{'.'.join(map(str, problem.loc))}: {problem.msg}")
        self.problem = problem


def refuse(kind: str, place: Place, msg: str) -> Malformed:
    """Make the error for a problem at a place of the body."""
    return Malformed(Problem(type=kind, loc=["body", *place], msg=msg))


def explain(error: Exception) -> Malformed:
    """Turn a decoder's error into one for the message's sender."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        byte = _BYTE.search(text)
        return refuse("json_invalid", (int(byte[1]),) if byte else (), f"JSON decode error: {text}")
    at = _AT.search(text)
    steps = tuple(name or int(index) for name, index in _STEP.findall(at[1])) if at else ()
    text = _AT.sub("", text)
    if missing := _MISSING.match(text):
        return refuse("missing", (*steps, missing[1]), "Field required")
    return refuse("value_error", steps, text)


def write(value: Any) -> bytes:
    """Encode a message."""
    return msgspec.json.encode(value)


def read(body: bytes, kind: type[T]) -> T:
    """Decode a message; numbers may be given as text, and unknown fields are ignored.

    Raises:
        Malformed: it is no JSON, or not of this type.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (ValueError, RecursionError) as error:
        raise explain(error) from None


def convert(query: Mapping[str, str], kind: type[T]) -> T:
    """Read the parameters of a query; raises Malformed where one of them is wrong."""
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise explain(error) from None


def write_batch(payloads: Sequence[bytes], lease: Any = None) -> bytes:
    """Encode a batch of groups that are JSON already.

    ``lease`` is what a trainer that asked for one is told beside the groups, under the key ``tandem``.
    """
    extra = b"" if lease is None else b',"tandem":' + write(lease)
    return b"".join((b'{"batch":[', b",".join(payloads), b"]", extra, b"}"))
