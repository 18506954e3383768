"""Which submissions are taken for repetitions, and for how long."""

from __future__ import annotations

from tandem.broker.queue.records import GroupEntry
from tandem.broker.server.resent import BEFORE_END, MOST, SECONDS, Resent


def entry(payload: bytes, received: float) -> GroupEntry:
    return GroupEntry(id=payload.decode(), env=None, size=1, received=received, payload=payload)


def test_each_stands_for_one_repetition_for_a_minute() -> None:
    resent = Resent()
    assert resent.among([b"a"], 0.0) == {}
    resent.note([b"a", b"b"], 0.0)
    matches = resent.among([b"x", b"b", b"b"], SECONDS)
    assert len(matches) == 1, "of two alike in one list, one is new"
    resent.forget(matches.values())
    assert resent.among([b"b"], SECONDS) == {}
    assert list(resent.among([b"a"], SECONDS)) == [0]
    assert resent.among([b"a"], SECONDS + 1) == {}


def test_memory_is_bounded() -> None:
    resent = Resent()
    resent.note((str(i).encode() for i in range(MOST + 1)), 0.0)
    assert resent.among([b"0"], 0.0) == {}
    assert list(resent.among([b"1", str(MOST).encode()], 0.0)) == [0, 1]


def test_after_a_restart_the_last_ones_may_come_again() -> None:
    resent = Resent()
    resent.restored([], 0.0)
    resent.restored([entry(b"old", 0.0), entry(b"late", 10.0), entry(b"last", 10.0 + BEFORE_END)], 100.0)
    assert list(resent.among([b"old", b"late", b"last"], 101.0)) == [1, 2]
