"""Groups as environments submit them: checked, and kept byte for byte with all 14 keys.

Each field is checked by itself and its values are let go at once, so a large group costs the memory of its largest
field. A field whose numbers came as text is written anew; all others keep the bytes that were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tandem_broker.protocol.messages import FIELDS, MOST_STEP, Real, ScoredGroup
from tandem_broker.protocol.wire import Malformed, Place, explain, refuse, write

WEIGH_BYTES = 1 << 20
"""Values of larger fields are counted before any is made."""
MOST_NUMBERS = 16_000_000
"""Most values of a field of numbers; a list weighs as much as four."""
MOST_FREE = 1_000_000
"""Most values of any other field."""
MOST_DEPTH = 64
"""Most lists and objects inside one another."""

TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(ScoredGroup)}
_REQUIRED = tuple(field.name for field in msgspec.structs.fields(ScoredGroup) if field.required)
_PER_TOKEN = ("masks", "advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
_PER_SEQUENCE = ("scores", "messages", "overrides")
_FREE = ("messages", "generation_params", "overrides", "group_overrides", "images")
_KEYS = tuple(f'{"," if place else "{"}"{name}":'.encode() for place, name in enumerate(FIELDS))
_Fields: Any = msgspec.defstruct("_Fields", [(name, msgspec.Raw | UnsetType, UNSET) for name in FIELDS])
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in TYPES.items()}
_LAX = {name: msgspec.json.Decoder(kind, strict=False) for name, kind in TYPES.items()}
_FIELDS = msgspec.json.Decoder(_Fields)


class Submission(msgspec.Struct, frozen=True):
    """An accepted group: what the broker needs to know of it, and the bytes to keep."""

    payload: bytes
    size: int
    """Sequences."""
    env_id: int | None
    version: int | None
    """Oldest policy step that sampled a token of it, if its maker said."""


def read_group(body: bytes) -> Submission:
    """Check a group.

    Raises:
        Malformed: a field is missing, of another type or out of bounds, or lengths disagree.
    """
    try:
        fields = _FIELDS.decode(body)
    except (ValueError, RecursionError) as error:
        raise explain(error, body) from None
    raws = {name: bytes(raw) for name in FIELDS if (raw := getattr(fields, name)) is not UNSET}
    if missing := [name for name in _REQUIRED if name not in raws]:
        raise refuse("missing", (missing[0],), "Field required")
    sizes: list[int] = []
    env_id = version = None
    positions: list[list[int]] | None = None
    for name in list(raws):
        value = _value(name, raws, sizes)
        if name == "tokens":
            sizes = _sizes(value)
        elif name == "env_id":
            env_id = value
        elif name == "group_overrides":
            version = _version(value or {})
        if name.startswith("distill") and value:
            lengths = [[len(position) for position in row] for row in value]
            if positions is not None and positions != lengths:
                raise refuse("value_error", (name,), "Value error, each position needs as many logprobs as token ids")
            positions = lengths
    values = (raws.get(name, b"null") for name in FIELDS)
    payload = b"".join((*chain.from_iterable(zip(_KEYS, values, strict=True)), b"}"))
    return Submission(payload=payload, size=len(sizes), env_id=env_id, version=version)


def read_groups(body: bytes, *, most: int = 10_000) -> list[Submission]:
    """Check a list of at most ``most`` groups, all or none.

    Raises:
        Malformed: one of them cannot be accepted; its index leads the problem's place.
    """
    try:
        raws = msgspec.json.decode(body, type=list[msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise explain(error, body) from None
    if len(raws) > most:
        raise refuse("too_long", (), f"a list has at most {most} groups, not {len(raws)}")
    submissions = []
    for index, raw in enumerate(raws):
        try:
            submissions.append(read_group(bytes(raw)))
        except Malformed as error:
            error.problem.loc.insert(1, index)
            raise Malformed(error.problem) from None
    return submissions


def _value(name: str, raws: dict[str, bytes], sizes: Sequence[int]) -> Any:
    """Decode and check one field; ``sizes`` are the tokens of each sequence. One that is coerced is written anew."""
    raw = raws[name]
    _check_weight(name, raw)
    try:
        value = _DECODERS[name].decode(raw)
    except (ValueError, RecursionError):
        try:
            value = _LAX[name].decode(raw)
        except (ValueError, RecursionError) as error:
            value = _spread(raw, sizes) if name == "advantages" else None
            if value is None:
                raise explain(error, raw, (name,)) from None
        raws[name] = write(value)
    if name in _FREE:
        _check_free(name, value, MOST_DEPTH)
    if value and name in _PER_SEQUENCE + _PER_TOKEN and len(value) != len(sizes):
        raise refuse("value_error", (name,), f"Value error, {len(value)} entries for {len(sizes)} sequences of tokens")
    if value and name in _PER_TOKEN:
        for place, (row, size) in enumerate(zip(value, sizes, strict=True)):
            if len(row) != size:
                raise refuse("value_error", (name, place), f"Value error, {len(row)} entries for {size} tokens")
    if name == "messages" and not all("role" in m and "content" in m for chat in value or () for m in chat):
        raise refuse("value_error", ("messages",), "Value error, Message must have 'role' and 'content' fields")
    return value


def _sizes(tokens: Sequence[Sequence[int]]) -> list[int]:
    sizes = [len(ids) for ids in tokens]
    if not sizes or 0 in sizes:
        place: Place = ("tokens", sizes.index(0)) if sizes else ("tokens",)
        raise refuse("value_error", place, "Value error, a group needs a sequence, and each sequence a token")
    return sizes


def _spread(raw: bytes, sizes: Sequence[int]) -> list[list[float]] | None:
    """One advantage for each sequence, as some clients send them, spread over its tokens."""
    try:
        advantages = msgspec.json.decode(raw, type=list[Real])
    except ValueError:
        return None
    return [[value] * size for value, size in zip(advantages, sizes, strict=False)]


def _version(overrides: dict[str, Any]) -> int | None:
    version = overrides.get("tandem_version")
    if version is not None and (type(version) is not int or not 0 <= version < MOST_STEP):
        place = ("group_overrides", "tandem_version")
        raise refuse("value_error", place, "Value error, a step is an int from 0 to below 2**53")
    return version


def _check_weight(name: str, raw: bytes) -> None:
    """Count values by their bytes before any is made: two bytes of JSON can become an object of a hundred."""
    if len(raw) <= WEIGH_BYTES:
        return
    most, container = (MOST_FREE, 1) if name in _FREE else (MOST_NUMBERS, 4)
    if raw.count(b",") + container * (raw.count(b"[") + raw.count(b"{")) > most:
        raise refuse("too_long", (name,), f"Value error, more than {most} values; send several groups")


def _check_free(name: str, value: Any, depth: int) -> None:
    """Refuse what another reader may fail at: deep nesting, and ints beyond 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise refuse("value_error", (name,), "Value error, an int beyond 64 bits")
    if isinstance(value, list | dict):
        if not depth:
            raise refuse("value_error", (name,), f"Value error, nested deeper than {MOST_DEPTH}")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_free(name, inner, depth - 1)
