"""Messages of the protocol as JSON, and what a client is told of one that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from tandem.errors import BrokerError

T = TypeVar("T")
Place = tuple[str | int, ...]

_BYTE = re.compile(r"byte (\d+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_AT = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class Malformed(BrokerError):
    """A message that cannot be accepted; ``problem`` says so in FastAPI's form, which Atropos' clients know."""

    def __init__(self, kind: str, place: Place, msg: str) -> None:
        """``place`` is where it is in the body."""
        where = ["body", *place]
        super().__init__(f"{'.'.join(map(str, where))}: {msg}")
        self.problem = {"type": kind, "loc": where, "msg": msg}


def explain(error: Exception) -> Malformed:
    """Turn a decoder's error into one for the message's sender."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        byte = _BYTE.search(text)
        return Malformed("json_invalid", (int(byte[1]),) if byte else (), f"JSON decode error: {text}")
    at = _AT.search(text)
    steps = tuple(name or int(index) for name, index in _STEP.findall(at[1])) if at else ()
    text = _AT.sub("", text)
    if missing := _MISSING.match(text):
        return Malformed("missing", (*steps, missing[1]), "Field required")
    return Malformed("value_error", steps, text)


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


def write_batch(payloads: Sequence[bytes], lease: Any = None) -> bytes:
    """Encode a batch of groups that are JSON already.

    ``lease`` is what a trainer that asked for one is told beside the groups, under the key ``tandem``.
    """
    extra = b"" if lease is None else b',"tandem":' + write(lease)
    return b"".join((b'{"batch":[', b",".join(payloads), b"]", extra, b"}"))
