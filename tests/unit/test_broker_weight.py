"""Values counted by their bytes alone: as many as a decoder would make."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from brokers import Client, group, play
from hypothesis import given

from tandem.broker.protocol import checks as weighing
from tandem.broker.protocol import wire
from tandem.broker.protocol.checks import CONTAINER, check_weight
from tandem.broker.protocol.lenient import Malformed
from tandem.broker.server.bodies import BodyLimits

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=40)
VALUES = st.recursive(PLAIN, lambda one: st.lists(one) | st.dictionaries(st.text(max_size=5), one), max_leaves=30)
MOST = 10**9


def weight(value: Any, encoding: str) -> int:
    """By walking: in JSON commas and containers, in MessagePack entries and containers."""
    if not isinstance(value, list | dict):
        return 0
    inside = list(value.values()) if isinstance(value, dict) else value
    entries = max(0, len(inside) - 1) if encoding == "json" else len(inside) * (1 + isinstance(value, dict))
    return CONTAINER + entries + sum(weight(one, encoding) for one in inside)


@pytest.mark.slow
@given(VALUES)
def test_it_is_what_walking_finds(value: Any) -> None:
    packed = msgspec.msgpack.encode(value)
    assert check_weight(packed, "msgpack", MOST, "x") == weight(value, "msgpack")
    if not any(map(math.isinf, (v for v in [value] if isinstance(v, float)))):
        text = json.dumps(value).encode()
        exact = weight(value, "json")
        assert exact <= check_weight(text, "json", MOST, "x")
        if exact < check_weight(text, "json", MOST, "x"):  # signs within texts: looked at closely where it matters
            assert check_weight(text, "json", exact, "x") == exact


def test_signs_within_texts_weigh_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "CHUNK", 7)
    for text in (",[{" * 99, '\\",[\\\\",{', "\\" * 8 + '"' + ",,", 'a"b,', "é,"):
        assert check_weight(json.dumps([text, {"k": text}]).encode(), "json", 7, "x") == 7


@given(st.binary(max_size=300))
def test_it_ends_whatever_it_is_given(raw: bytes) -> None:
    for encoding in ("json", "msgpack"):
        with contextlib.suppress(Malformed):
            assert check_weight(raw, encoding, 50, "x") <= 50


def test_texts_binaries_and_extensions_are_stepped_over() -> None:
    parts = [b"\xc4\x02\x9f\x9f", b"\xc5\x00\x01\x9f", b"\xc6\x00\x00\x00\x01\x9f"]
    parts += [b"\xd4\x01\x9f", b"\xd8\x01" + b"\x9f" * 16, b"\xc7\x02\x01\x9f\x9f"]
    parts += [b"\xd9\x01\x9f", b"\xda\x00\x01\x9f", b"\xdb\x00\x00\x00\x01\x9f"]
    raw = bytes([0x90 | len(parts)]) + b"".join(parts)
    assert check_weight(raw, "msgpack", MOST, "x") == CONTAINER + len(parts)


HEAVY = {
    "empty lists": {"images": [[]] * 1_200_000},
    "empty objects": {"images": [{}] * 1_200_000},
    "texts": {"images": ["a"] * 1_100_000},
    "numbers": {"group_overrides": {"a": [1] * 1_100_000}},
    "messages": {"messages": [[{"role": "user", "content": ""}] * 200_000]},
    "teachers": {"distill_token_ids": [[[]] * 3_000_000]},
}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("fields", HEAVY.values(), ids=HEAVY)
def test_bodies_that_would_become_gigabytes_are_refused(
    fields: dict[str, Any], encoding: wire.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_NUMBERS", 2_000_000)
    body = wire.write(group(1, **fields), encoding)
    with pytest.raises(Malformed, match=r"more than \d+ values"):
        wire.read_group(body, encoding)


def test_long_texts_and_long_lists_of_numbers_are_taken() -> None:
    body = group(1, images="[,{" * 2_000_000, tokens=[[7] * 400_000], masks=[[7] * 400_000])
    for encoding in ("json", "msgpack"):
        assert wire.read_group(wire.write(body, encoding), encoding).size == 1  # type: ignore[arg-type]


def test_large_bodies_are_not_read_leniently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LENIENT_BYTES", 2_000_000)
    sent = group(1, scores=["0.5"], images="x" * 1_500_000)
    assert wire.read_group(wire.write(sent), "json").size == 1
    with pytest.raises(Malformed, match="Expected `float`, got `str`"):
        wire.read_group(wire.write({**sent, "images": "x" * 2_000_000}), "json")
    for broken in (b"[" * 3_000_000, b'{"tokens":' + b"[" * 3_000_000, b"\x91" * 3_000_000):
        for encoding in ("json", "msgpack"):
            with pytest.raises(Malformed):
                wire.read_group(broken, encoding)  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_what_is_read_again_leniently_is_weighed_whole(
    encoding: wire.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields that nobody knows, and bodies that are no lists at all, would become values too."""
    monkeypatch.setattr(wire, "plain", lambda *_: pytest.fail("it was decoded"))
    hidden = group(1, scores=["0.5"], unknown=[[]] * 2_500_000)
    with pytest.raises(Malformed, match="more than 4000000 values"):
        wire.read_group(wire.write(hidden, encoding), encoding)
    with pytest.raises(Malformed, match="Input should be a valid list"):
        wire.read_groups(wire.write(hidden, encoding), encoding)


def test_messages_that_are_no_groups_are_short() -> None:
    async def scene(client: Client) -> None:
        reply = await client.post("/register", b'{"x":"' + b"x" * (1 << 16) + b'"}')
        assert reply.status == 413

    play(scene, limits=BodyLimits())
