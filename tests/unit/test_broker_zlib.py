"""Whichever library inflates: the same bytes, and the same damage."""

from __future__ import annotations

import gzip
import random
import zlib
from typing import Any

import pytest

from tandem.broker import compression

RAW = b"".join(b"%d, " % (k * k) for k in range(400))
WHOLE = gzip.compress(RAW, mtime=0)
FLAGS = 3
"""Place in a header of bits of which ISA-L ignores some."""


@pytest.fixture(params=["isal.isal_zlib", "zlib"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip(request.param)
    monkeypatch.setattr(compression, "_library", module)
    return module


def inflated(data: bytes, most: int, broken: type[Exception]) -> tuple[bytes, bytes] | None:
    """What a member holds and what follows it; None: it is none, or not whole."""
    stream = compression.gunzip()
    try:
        output = stream.decompress(data, most)
    except broken:
        return None
    return (output, stream.unused_data) if stream.eof else None


def test_a_member_and_what_follows(library: Any) -> None:
    assert inflated(WHOLE, 1 << 20, library.error) == (RAW, b"")
    assert inflated(WHOLE + b"more", 1 << 20, library.error) == (RAW, b"more")
    assert inflated(WHOLE + WHOLE, 1 << 20, library.error) == (RAW, WHOLE)
    assert inflated(gzip.compress(b""), 1, library.error) == (b"", b"")


@pytest.mark.parametrize("most", [1, 100, len(RAW) - 1])
def test_never_more_than_asked_for(library: Any, most: int) -> None:
    stream = compression.gunzip()
    assert stream.decompress(gzip.compress(bytes(1 << 20)), most) == bytes(most)
    assert not stream.eof
    assert inflated(WHOLE, most, library.error) is None


def test_damage_is_found(library: Any) -> None:
    chance = random.Random(0)
    for place in range(len(WHOLE)):
        assert inflated(WHOLE[:place], 1 << 20, library.error) is None
        bad = bytearray(WHOLE)
        bad[place] ^= 1 << chance.randrange(8)
        harmless = 4 <= place < 10 or place == FLAGS  # time, system and the like
        member = inflated(bytes(bad), 1 << 20, library.error)
        assert member is None or (harmless and member == (RAW, b"")), place


def test_checksums(library: Any) -> None:
    assert compression.crc32(RAW) == zlib.crc32(RAW)
    assert compression.crc32(b"") == 0


def test_what_is_installed_is_used() -> None:
    try:
        import isal.isal_zlib as fastest
    except ImportError:
        fastest = zlib
    assert isinstance(compression.gunzip(), type(fastest.decompressobj()))
    assert issubclass(fastest.error, compression.BROKEN)
