"""Groups as environments submit them: checked, and kept as JSON with all 14 keys."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from tandem_broker.protocol.messages import MOST_STEP, ScoredGroup
from tandem_broker.protocol.wire import Malformed, Place, explain, write

WEIGH_BYTES = 1 << 20
"""Values of larger bodies are counted before any is made."""
MOST_VALUES = 16_000_000
"""Most values of a body; a list counts as 4 and an object as 8, since they take so much more memory than a number."""
MOST_DEPTH = 64
"""Most lists and objects inside one another."""

_PER_TOKEN = ("masks", "advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
_PER_SEQUENCE = ("scores", "messages", "overrides")
_FREE = ("messages", "generation_params", "overrides", "group_overrides", "images")
_DECODER = msgspec.json.Decoder(ScoredGroup, strict=False)
_LIST_DECODER = msgspec.json.Decoder(list[ScoredGroup], strict=False)


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted group: what the broker needs to know of it, and the bytes to keep."""

    id: str
    """Unique."""
    env: int | None
    """The environment's id as submitted; an unknown one counts as None (anonymous)."""
    size: int
    """Sequences, at least 1."""
    version: int | None = None
    """Oldest policy step that sampled a token of it; None: the store stamps the policy step it knows of."""
    payload: bytes


def read_group(body: bytes) -> GroupEntry:
    """Check a group that is submitted; raises as ``read_scored``."""
    return _entry(read_scored(body))


def read_scored(body: bytes) -> ScoredGroup:
    """Read and check a group.

    Raises:
        Malformed: a field is missing, of another type or out of bounds, or lengths disagree.
    """
    return _checked(_decoded(body, _DECODER), ())


def read_groups(body: bytes, *, most: int = 10_000) -> list[GroupEntry]:
    """Check a list of at most ``most`` groups, all or none.

    Raises:
        Malformed: one of them cannot be accepted; its index leads the problem's place.
    """
    groups = _decoded(body, _LIST_DECODER)
    if len(groups) > most:
        raise Malformed("too_long", (), f"a list has at most {most} groups, not {len(groups)}")
    return [_entry(_checked(group, (index,))) for index, group in enumerate(groups)]


def _decoded(body: bytes, decoder: Any) -> Any:
    """Decode a body; one with too many values is refused before any is made: ``[]`` can become 30 times its bytes."""
    if len(body) > WEIGH_BYTES and body.count(b",") + 4 * body.count(b"[") + 8 * body.count(b"{") > MOST_VALUES:
        raise Malformed("too_long", (), f"Value error, more than {MOST_VALUES} values; send several groups")
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise explain(error) from None


def _entry(group: ScoredGroup) -> GroupEntry:
    version = (group.group_overrides or {}).get("tandem_version")
    size, env = len(group.tokens), group.env_id
    return GroupEntry(id=secrets.token_hex(12), env=env, size=size, version=version, payload=write(group))


def _checked(group: ScoredGroup, at: Place) -> ScoredGroup:
    """Check what types cannot say of the group at a place of the body."""
    sizes = [len(ids) for ids in group.tokens]
    if not sizes or 0 in sizes:
        place = (*at, "tokens", sizes.index(0)) if sizes else (*at, "tokens")
        raise Malformed("value_error", place, "Value error, a group needs a sequence, and each sequence a token")
    for name in _PER_SEQUENCE + _PER_TOKEN:
        rows = getattr(group, name) or []
        if rows and len(rows) != len(sizes):
            why = f"Value error, {len(rows)} entries for {len(sizes)} sequences of tokens"
            raise Malformed("value_error", (*at, name), why)
        for index, row in enumerate(rows if name in _PER_TOKEN else ()):
            if isinstance(row, float):  # one advantage for a sequence
                rows[index] = [row] * sizes[index]
            elif len(row) != sizes[index]:
                why = f"Value error, {len(row)} entries for {sizes[index]} tokens"
                raise Malformed("value_error", (*at, name, index), why)
    for name in _FREE:
        _check_free((*at, name), getattr(group, name), MOST_DEPTH)
    if not all("role" in m and "content" in m for chat in group.messages or () for m in chat):
        why = "Value error, Message must have 'role' and 'content' fields"
        raise Malformed("value_error", (*at, "messages"), why)
    version = (group.group_overrides or {}).get("tandem_version")
    if version is not None and (type(version) is not int or not 0 <= version < MOST_STEP):
        why = "Value error, a step is an int from 0 to below 2**53"
        raise Malformed("value_error", (*at, "group_overrides", "tandem_version"), why)
    return group


def _check_free(place: Place, value: Any, depth: int) -> None:
    """Refuse what another reader may fail at: deep nesting, and ints beyond 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise Malformed("value_error", place, "Value error, an int beyond 64 bits")
    if isinstance(value, list | dict):
        if not depth:
            raise Malformed("value_error", place, f"Value error, nested deeper than {MOST_DEPTH}")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_free(place, inner, depth - 1)
