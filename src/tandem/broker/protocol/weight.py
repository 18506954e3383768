"""How many values bytes would become, told without making them: a byte or two can be an object of a hundred.

Numbers of long lists and free fields have bounds of their own. What is looked at is well-formed already.
"""

from __future__ import annotations

import re

import numpy as np

from tandem.broker.protocol.lax import refuse

MOST_NUMBERS = 16_000_000
"""Most values of all lists of numbers of a group that are decoded."""
MOST_FREE = 1_000_000
"""Most values of all its other fields."""
CONTAINER = 3
"""A list or an object weighs as much as so many values more."""
CHUNK = 1 << 20
"""Bytes that are looked at by one step, between which other threads have their turn."""

_QUOTE, _COMMA, _LIST, _OBJECT = (ord(sign) for sign in '",[{')
# The longest run of MessagePack's numbers, booleans and nulls, of which each says its length by its first byte.
_SCALARS = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}){1,4096}",
    re.DOTALL,
)
_TEXTS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First bytes of texts and binaries, and how many bytes their lengths have."""
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_MANY = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First bytes of long lists and maps: how many bytes their sizes have, and values in an entry."""


def check_weight(raw: bytes | memoryview, encoding: str, most: int, name: str) -> int:
    """The values of a part of a message.

    Args:
        raw: well-formed.
        encoding: json or msgpack.
        most: more are refused.
        name: of the field; empty: it is all of the message.

    Raises:
        Malformed: there are more.
    """
    found = _json(bytes(raw), most) if encoding == "json" else _msgpack(bytes(raw), most)
    if found > most:
        raise refuse(
            "too_long", (name,) if name else (), f"Value error, more than {most} values; send fewer, or several groups"
        )
    return found


def _json(raw: bytes, most: int) -> int:
    found = raw.count(b",") + CONTAINER * (raw.count(b"[") + raw.count(b"{"))
    if found <= most or b'"' not in raw:
        return found
    # Some may be within texts. Without escaped quotes every second quote ends one.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    found, within = 0, False
    for start in range(0, len(plain), CHUNK):
        codes = np.frombuffer(plain, np.uint8, min(CHUNK, len(plain) - start), start)
        inside = np.logical_xor.accumulate(codes == _QUOTE) ^ within
        outside = codes[~inside]
        found += int(np.count_nonzero(outside == _COMMA))
        found += CONTAINER * int(np.count_nonzero((outside == _LIST) | (outside == _OBJECT)))
        within = bool(inside[-1])
        if found > most:
            break
    return found


def _msgpack(raw: bytes, most: int) -> int:
    found, place, end = 0, 0, len(raw)
    while place < end and found <= most:
        kind = raw[place]
        if run := _SCALARS.match(raw, place):
            place = run.end()
        elif 0x80 <= kind <= 0x9F:
            place += 1
            found += CONTAINER + (kind & 15) * (1 if kind >= 0x90 else 2)
        elif 0xA0 <= kind <= 0xBF:
            place += 1 + (kind & 31)
        elif kind in _MANY:
            size, entry = _MANY[kind]
            found += CONTAINER + int.from_bytes(raw[place + 1 : place + 1 + size], "big") * entry
            place += 1 + size
        elif kind in _TEXTS or kind in _EXTENSIONS:
            size = _TEXTS.get(kind) or _EXTENSIONS[kind]
            place += 1 + size + int.from_bytes(raw[place + 1 : place + 1 + size], "big") + (kind in _EXTENSIONS)
        else:
            place += _FIXED.get(kind, 0) + 1
    return found
