"""Decoders by type and encoding, and what is said of bytes that are no message at all."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tandem.broker.protocol.lax import refuse

Encoding = Literal["json", "msgpack"]

_BYTE = re.compile(r"byte (\d+)")
_decoders: dict[tuple[Any, Encoding], Any] = {}


def decoder(kind: Any, encoding: Encoding) -> Any:
    """What decodes a type from an encoding; made once."""
    found = _decoders.get((kind, encoding))
    if found is None:
        module: Any = msgspec.json if encoding == "json" else msgspec.msgpack
        found = _decoders[kind, encoding] = module.Decoder(kind)
    return found


def plain(body: bytes, encoding: Encoding) -> Any:
    """A message as plain values, or what keeps it from being one."""
    name = "JSON" if encoding == "json" else "MessagePack"
    try:
        return decoder(Any, encoding).decode(body)
    except RecursionError:
        raise refuse(f"{encoding}_invalid", (), f"{name} nested too deep") from None
    except ValueError as error:
        place = _BYTE.search(str(error))
        loc = (int(place[1]),) if place else ()
        why = str(error).removeprefix(f"{name} is malformed: ")
        if encoding == "json" and (b"NaN" in body or b"Infinity" in body):
            why += "; NaN and Infinity are no numbers of JSON, and every number must be finite"
        raise refuse(f"{encoding}_invalid", loc, f"{name} decode error", {}, why) from None
