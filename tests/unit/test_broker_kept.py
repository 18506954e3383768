"""Payloads that left memory are read back from the disk, whatever happens to them there meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from brokers import Client, group, play, run_parameters

from tandem.broker.journal import payloads
from tandem.broker.journal.ledger import Ledger
from tandem.broker.journal.payloads import PayloadPlace, PayloadReader, Payloads, StoredPayload, read
from tandem.broker.queue.records import EnvSpec, GroupEntry, ServedBatch, StoreOptions
from tandem.errors import BrokerError


@contextmanager
def ledger(folder: Path, memory: int = 0, **options: int) -> Iterator[Ledger]:
    opened = Ledger.open(folder, StoreOptions(memory_bytes=memory, **options), 0.0)
    try:
        if opened.store.run is None:
            opened.store.register(run_parameters(batch_size=2, max_token_len=8))
            opened.store.take(0.0)
        yield opened
    finally:
        opened.close()


def data(name: int) -> bytes:
    return b"%d " % name * 100


def put(ledger: Ledger, *names: int, size: int = 1, env: int | None = None) -> None:
    for name in names:
        ledger.store.put(GroupEntry(id=str(name), env=env, size=size, payload=data(name)), 0.0)
    ledger.settled().result(30)


def take(ledger: Ledger) -> ServedBatch:
    batch = ledger.store.take(0.0, lease=True)
    assert batch is not None
    return batch


def finish(ledger: Ledger, batch: ServedBatch) -> None:
    assert ledger.store.acknowledge(batch.id, 0.0)
    ledger.settled().result(30)


def in_memory(ledger: Ledger) -> list[str]:
    return [item.entry.id for item in ledger.store.waiting if item.entry.payload.data is not None]


def payload_files(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "payloads").iterdir()) if path.stat().st_size]


def test_what_does_not_fit_into_memory_is_read_back(tmp_path: Path) -> None:
    with ledger(tmp_path, memory=3 * len(data(10))) as one:
        put(one, *range(10, 18))
        assert in_memory(one) == ["10", "11", "12"]  # those that are served first
        assert one.memory.bytes == 3 * len(data(10))
        for first in (10, 12, 14):
            batch = take(one)
            reading = PayloadReader(batch.entries)
            assert reading.on_disk == (first != 10)
            assert reading.bytes() == [data(first), data(first + 1)]
            finish(one, batch)
        assert one.memory.bytes == 0
        put(one, 18)  # there is room again
        assert in_memory(one) == ["18"]
        assert one.store.status(0.0).held_bytes == sum(len(data(name)) for name in (16, 17, 18))


def test_a_batch_that_came_back_is_read_again(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        put(one, 1, 2)
        for _ in range(3):
            batch = take(one)
            assert asyncio.run(read(batch.entries)) == [data(1), data(2)]
            assert one.store.release(batch.id, 0.0)


def test_a_long_queue_is_not_in_memory_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path, memory=1 << 20) as one:
        put(one, *range(100, 150))
        assert len(in_memory(one)) == 50
    with ledger(tmp_path, memory=1 << 20) as two:
        assert in_memory(two) == []
        assert two.memory.bytes == 0
        assert two.store.status(0.0).held_bytes == 50 * len(data(100))
        put(two, 150, 151)
        assert in_memory(two) == ["150", "151"]
        for first in range(100, 152, 2):
            batch = take(two)
            assert PayloadReader(batch.entries).bytes() == [data(first), data(first + 1)]
            finish(two, batch)


def test_a_batch_under_way_is_whole_though_it_is_trained_and_its_file_goes(tmp_path: Path) -> None:
    """A trainer that asks twice at once: its first batch counts as trained while it is still read."""
    with ledger(tmp_path) as one:
        put(one, 1, 2)
    with ledger(tmp_path) as two:  # which writes to another file
        batch = take(two)
        reading = PayloadReader(batch.entries)
        (file,) = payload_files(tmp_path)
        finish(two, batch)
        assert not file.exists()
        assert reading.bytes() == [data(1), data(2)]


def test_a_payload_that_moves_while_it_is_looked_for_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Payloads(tmp_path)
    (place,) = files.append([data(5)])
    kept = StoredPayload(files, place=PayloadPlace(99, *place[1:]))
    real = Payloads.opened

    def moving(self: Payloads, at: PayloadPlace) -> Any:
        if kept.place is at and at.file == 99:
            kept.place = place
        return real(self, at)

    monkeypatch.setattr(Payloads, "opened", moving)
    assert PayloadReader([GroupEntry(id="5", env=None, size=1, payload=kept)]).bytes() == [data(5)]
    kept.place = PayloadPlace(98, *place[1:])
    with pytest.raises(BrokerError, match="damaged or missing"):
        PayloadReader([GroupEntry(id="5", env=None, size=1, payload=kept)])
    files.close()


@pytest.mark.slow
def test_payloads_are_found_where_they_were_moved_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage goes along, and is still known as such."""
    monkeypatch.setattr(payloads, "FILE_BYTES", 10_000)
    with ledger(tmp_path) as one:
        one.store.register_env(EnvSpec(name="e", max_token_length=8, group_size=99), 0.0)
        for name in range(60):
            put(one, name, env=0)  # waits for the rest of its group, in a file of which nothing else is needed
            if name == 0:
                (file,) = payload_files(tmp_path)
                file.write_bytes(file.read_bytes().replace(data(0)[:9], b"x" + data(0)[1:9], 1))
            put(one, 100, 101)
            put(one, 100, 101)
            finish(one, take(one))
            finish(one, take(one))
        old = [item.entry for item in one.store.waiting]
        assert old[0].payload.place.file > 1
        assert PayloadReader(old[1:]).bytes() == [data(name) for name in range(1, 60)]
        with pytest.raises(BrokerError, match="damaged"):
            PayloadReader(old[:1]).bytes()


def test_a_damaged_payload_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        reply = await client.get("/batch")
        assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
        assert str(file) in reply.json["detail"]
        assert "damaged" in reply.json["detail"]
        held = (await client.get("/status?detail=1")).json["detail"]
        assert (held["queued_groups"], held["leased_groups"]) == (2, 0)
        file.unlink()
        file.mkdir()
        assert "cannot be read: Is a directory" in (await client.get("/batch")).json["detail"]
        file.rmdir()
        assert "missing" in (await client.get("/batch")).json["detail"]
        file.write_bytes(good[:-5000])
        assert "damaged" in (await client.get("/batch")).json["detail"]
        file.write_bytes(good)
        assert [one["scores"] for one in (await client.get("/batch")).json["batch"]] == [[1.0], [2.0]]

    with ledger(tmp_path) as one:
        for name in (1, 2):
            payload = json.dumps(group(1, scores=[float(name)])).encode()
            one.store.put(GroupEntry(id=str(name), env=None, size=1, received=10.0 * name, payload=payload), 0.0)
    (file,) = payload_files(tmp_path)
    good = file.read_bytes()
    file.write_bytes(good.replace(b"1.0", b"7.0", 1))
    with ledger(tmp_path) as two:
        play(scene, ledger=two)


@pytest.mark.parametrize("restarted", [True, False])
def test_the_latest_example_stays_though_it_was_trained(tmp_path: Path, restarted: bool) -> None:
    with ledger(tmp_path) as one:
        put(one, 1, 2)
        assert one.store.release(take(one).id, 0.0)
        if not restarted:
            finish(one, take(one))
            assert one.store.latest is not None
            assert PayloadReader([one.store.latest]).bytes() == [data(2)]
            return
    with ledger(tmp_path) as two:
        assert two.store.release(take(two).id, 0.0)
        finish(two, take(two))
        assert not payload_files(tmp_path)
        assert two.store.latest is not None
        assert PayloadReader([two.store.latest]).bytes() == [data(2)]


def test_a_served_group_is_the_one_that_was_submitted(tmp_path: Path) -> None:
    """Over HTTP in both encodings, from the disk."""

    async def scene(client: Client) -> None:
        sent = [group(1, scores=[float(name)], tokens=[[name] * 500], masks=[[name] * 500]) for name in range(40)]
        for one in sent:
            assert (await client.post("/scored_data", one)).status == 200
        for place in range(0, 40, 2):
            batch = (await client.get("/batch")).json["batch"]
            assert [one["tokens"] for one in batch] == [one["tokens"] for one in sent[place : place + 2]]
        assert (await client.get("/latest_example")).json["scores"] == [39.0]

    with ledger(tmp_path) as one:
        play(scene, ledger=one)


def test_a_group_sent_again_is_known_after_a_restart(tmp_path: Path) -> None:
    """Its bytes are on disk alone then."""

    async def send(client: Client) -> None:
        assert (await client.post("/scored_data", group(1))).status == 200
        assert (await client.get("/status")).json["queue_size"] == 1

    for _ in range(2):
        with ledger(tmp_path) as one:
            play(send, ledger=one)
