"""What a group on the wire leaves out, filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


def flat_advantages(value: Any) -> Any:
    """One advantage per sequence instead of per token, which a known client sends, spread over the tokens."""
    if not isinstance(value, dict):
        return value
    given, tokens = value.get("advantages"), value.get("tokens")
    if not (isinstance(given, list) and isinstance(tokens, list) and len(given) == len(tokens) > 0):
        return value
    if any(isinstance(one, list) for one in given) or not all(isinstance(one, list) for one in tokens):
        return value
    return {**value, "advantages": [[one] * len(ids) for one, ids in zip(given, tokens, strict=True)]}


def completed(body: bytes, missing: Sequence[str], encoding: str) -> bytes:
    """A group's own bytes, with the keys that it lacks in front."""
    if encoding == "json":
        start = body.index(b"{")  # only whitespace can precede it
        if not missing and start == 0:
            return body
        return b"".join((b"{", *(f'"{name}":null,'.encode() for name in missing), memoryview(body)[start + 1 :]))
    size, start = _map_head(body)
    head = b"\xde" + (size + len(missing)).to_bytes(2, "big")
    return b"".join((head, *(msgspec.msgpack.encode(name) + b"\xc0" for name in missing), memoryview(body)[start:]))


def _map_head(body: bytes) -> tuple[int, int]:
    """Pairs of a MessagePack map, and where the first begins."""
    if body[0] == 0xDE:
        return int.from_bytes(body[1:3], "big"), 3
    if body[0] == 0xDF:
        return int.from_bytes(body[1:5], "big"), 5
    return body[0] & 0x0F, 1
