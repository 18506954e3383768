"""The ledger: what it promised is there after a restart and after kill -9; what is not its own it refuses."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import broker_kills
import msgspec
import pytest
from msgspec.structs import replace
from support.brokers import env_spec, run_parameters, some

from tandem.errors import BrokerError
from tandem_broker.journal.database import Database
from tandem_broker.journal.ledger import Ledger, Statement, StoredPayload, read
from tandem_broker.queue.records import GroupEntry, GroupRefused, StoreOptions

ROOT = Path(__file__).parents[2]
RUN = run_parameters(batch_size=4, max_token_len=64, wandb_project="p", num_steps=9)


@contextmanager
def ledger(folder: Path, now: float = 0.0, options: StoreOptions | None = None) -> Iterator[Ledger]:
    opened = Ledger.open(folder, options or StoreOptions(), now)
    try:
        yield opened
    finally:
        opened.close()


def begun(ledger: Ledger) -> None:
    ledger.store.register(RUN)
    ledger.store.take(0.0)


def put(
    ledger: Ledger, name: str, size: int = 4, env: int | None = None, key: str | None = None, data: bytes = b""
) -> str:
    entry = GroupEntry(id=name, env=env, size=size, version=3, received=5.0, payload=data or name.encode())
    return ledger.store.put(entry, 0.0, key=key).kind


def loaded(entries: Sequence[GroupEntry]) -> list[GroupEntry]:
    """With their bytes, wherever these are."""
    payloads = asyncio.run(read(entries))
    return [replace(entry, payload=data) for entry, data in zip(entries, payloads, strict=True)]


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        ticket = some(one.store.register_env(env_spec(name="e", max_token_length=8, group_size=4), 0.0, key="me"))
        assert put(one, "a", key="k") == "received"
        assert put(one, "b") == "received"
        assert put(one, "c", size=3, env=0) == "buffered"
        batch = some(one.store.take(0.0, lease=True, seconds=10.0, policy=6))
    with ledger(tmp_path, now=100.0) as two:
        store = two.store
        assert (store.run, store.step, store.started, store.policy_step) == (RUN, 1, True, 6)
        known = store.register_env(env_spec(name="e", max_token_length=8, group_size=4), 100.0, key="me")
        assert known == msgspec.structs.replace(ticket, starting_step=7)  # the one after the six that the trainer told
        again = some(store.register_env(env_spec(name="e", max_token_length=8), 100.0))
        assert (again.env_id, again.wandb_name) == (1, "e_1")
        assert put(two, "a", key="k") == "duplicate"
        second_batch = some(store.take(100.0, lease=True))
        assert loaded(second_batch.entries) == [
            GroupEntry(id="b", env=None, size=4, version=3, received=5.0, payload=b"b")
        ]
        assert store.acknowledge(batch.id, 109.0)  # its lease began anew
        assert [item.entry.id for item in store.tenants.by_id[0].buffer] == ["c"]


def test_an_environment_that_was_silent_holds_no_share_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        for name in ("gone", "here"):
            assert one.store.register_env(env_spec(name=name, max_token_length=8, min_batch_allocation=0.25), 0.0)
        one.store.status_env(1, 100.0)
    with ledger(tmp_path, now=101.0) as two:
        assert [env["connected"] for env in two.store.status(101.0).envs] == [False, True]
        assert two.store.status_env(0, 102.0).unallocated_fraction == 0.5  # it spoke
    with ledger(tmp_path, now=103.0) as three:
        assert [env["connected"] for env in three.store.status(103.0).envs] == [True, True]


def test_partial_groups_that_were_joined_are_still_joined_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        one.store.register_env(env_spec(name="e", max_token_length=8, group_size=4), 0.0)
        assert [put(one, name, size=size, env=0) for name, size in (("a", 3), ("b", 1), ("c", 2))] == ["buffered"] * 3
    with ledger(tmp_path) as two:
        assert {item.entry.id: item.state for item in two.store.waiting} == {
            "a": "queued",
            "b": "queued",
            "c": "buffered",
        }


@pytest.mark.parametrize("delivered", [True, False])
def test_a_plain_trainers_batch_is_served_again_unless_its_answer_went_out(tmp_path: Path, delivered: bool) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        put(one, "b")
        batch = some(one.store.take(0.0, trainer="t"))
        if delivered:
            one.store.delivered(batch.id)
    with ledger(tmp_path) as two:
        after = some(two.store.take(0.0, trainer="t"))
        assert [entry.id for entry in after.entries] == (["b"] if delivered else ["a"])
        assert two.store.step == (2 if delivered else 1)
        assert two.store.counts["trained"] == int(delivered)


def test_a_kill_between_two_events_strands_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's thread may end a transaction after any of them."""
    heard = Ledger._record

    def cut_off(events: int) -> int:
        """Kill it after so many events; returns how many there would have been."""
        num_events = 0

        def record(self: Ledger, *statements: Statement, payload: StoredPayload | None = None) -> None:
            nonlocal num_events
            num_events += 1
            if num_events <= events:
                heard(self, *statements, payload=payload)

        monkeypatch.setattr(Ledger, "_record", record)
        with ledger(tmp_path / str(events)) as one:
            begun(one)
            put(one, "a")
            put(one, "b")
            first = some(one.store.take(0.0, lease=True))
            one.store.acknowledge(first.id, 0.0)
            second = some(one.store.take(0.0, lease=True))
            one.store.return_lease(second.id, 0.0)
        monkeypatch.setattr(Ledger, "_record", heard)
        with ledger(tmp_path / str(events)) as two:
            out = [order for lease in two.store.leases.out.values() for order in lease.orders]
            assert len(two.store.waiting.items) == len(list(two.store.waiting)) + len(out)
        return num_events

    all_events = cut_off(10_000)
    for events in range(all_events):
        cut_off(events)


def test_a_lease_that_ran_out_stays_over_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        first = some(one.store.take(0.0, lease=True, seconds=10.0))
        second = some(one.store.take(10.0, lease=True))
    with ledger(tmp_path) as two:
        assert list(two.store.leases.out) == [second.id]
        assert two.store.acknowledge(first.id, 0.0)  # late, but the first to say so
        assert not two.store.acknowledge(second.id, 0.0)
        assert two.store.take(0.0) is None


def test_a_late_acknowledgement_after_a_restart_is_told_who_was_first(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        first = some(one.store.take(0.0, lease=True, seconds=10.0))
        second = some(one.store.take(10.0, lease=True))
        one.store.acknowledge(second.id, 11.0)
    for _ in range(2):
        with ledger(tmp_path):
            pass
    with ledger(tmp_path) as two:
        late = two.store.acknowledge(first.id, 0.0)
        assert (late.ok, late.trained, late.already) == (False, 0, 1)


def test_an_acknowledgement_whose_answer_was_lost_is_known_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        batch = some(one.store.take(0.0, lease=True))
        answer = one.store.acknowledge(batch.id, 0.0)
    with ledger(tmp_path) as two:
        assert two.store.acknowledge(batch.id, 0.0) == answer
        assert two.store.take(0.0) is None


def test_a_reset_leaves_nothing(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a", key="k", data=b"x" * 1000)
        one.settled().result(10)
        one.store.reset()
        begun(one)
        put(one, "b", key="k")
    with ledger(tmp_path) as two:
        assert [item.entry.id for item in two.store.waiting] == ["b"]


def test_two_brokers_cannot_share_a_folder(tmp_path: Path) -> None:
    with ledger(tmp_path), pytest.raises(BrokerError, match="another broker uses"):
        Ledger.open(tmp_path, StoreOptions(), 0.0)
    with ledger(tmp_path):
        pass


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(BrokerError, match="belongs to another program"):
        Ledger.open(tmp_path, StoreOptions(), 0.0)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with ledger(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        file.execute("PRAGMA user_version = 1")
    file.close()
    with pytest.raises(BrokerError, match="has format 1"):
        Ledger.open(tmp_path, StoreOptions(), 0.0)


@pytest.mark.parametrize("step", [2**53, 2**63, 2**64 - 1])
def test_a_number_that_no_column_takes_costs_nobody_else(tmp_path: Path, step: int) -> None:
    """Neither those that are written with it nor those after it."""
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "before")
        poison = GroupEntry(id="poison", env=None, size=4, version=step, received=5.0, payload=b"p")
        with pytest.raises(GroupRefused, match="expected 0 to below"):
            one.store.put(poison, 0.0)
        put(one, "with")
        one.settled().result(20)
        put(one, "after")
        one.settled().result(20)
    with ledger(tmp_path) as two:
        assert two.store.queued_groups == 3


def test_many_submissions_share_a_transaction(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        for k in range(2000):
            put(one, str(k))
        one.settled().result(30)
        assert one.transactions < 1000
        assert one.settled().done()


def test_a_ledger_that_cannot_write_promises_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with ledger(tmp_path) as one:
        begun(one)
        put(one, "kept")
        one.settled().result(10)
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "_write", full)
            put(one, "lost")
            with pytest.raises(BrokerError, match="disk is full"):
                one.settled().result(10)
        put(one, "later")
        with pytest.raises(BrokerError, match="nothing is accepted"):
            one.settled().result(10)
    with ledger(tmp_path) as two:
        assert [item.entry.id for item in two.store.waiting] == ["kept"]


def test_keys_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_broker.journal.ledger.TRIM_EVERY", 1)
    with ledger(tmp_path, options=StoreOptions(max_keys=5)) as one:
        begun(one)
        for k in range(20):
            put(one, str(k), key=str(k))
            one.settled().result(10)
    with ledger(tmp_path) as two:
        assert len(two.store.seen) == 5
        assert put(two, "x", key="19") == "duplicate"


@pytest.mark.slow
def test_nothing_promised_is_lost_by_kill_minus_nine(tmp_path: Path, long: bool) -> None:
    """Kills of the server at random moments under load."""
    clients = asyncio.run(broker_kills.trial(tmp_path, kills=8 if long else 3, seed=0))
    assert len(clients.accepted) > 30  # few, so that a busy machine manages them
    assert clients.acknowledged.total() > 5
    assert clients.lost == clients.doubled == 0


def test_a_broker_that_is_killed_lets_the_folder_go(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from tandem_broker.journal.ledger import Ledger\nfrom tandem_broker.queue.records import StoreOptions\n"
        "Ledger.open(pathlib.Path(sys.argv[1]), StoreOptions(), 0.0)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    with ledger(tmp_path):
        pass


def test_a_full_disk_at_the_start_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **more: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Database, "prepare", full)
    with pytest.raises(BrokerError, match=r"cannot be opened \(database or disk is full\); make room"):
        Ledger.open(tmp_path / "data", StoreOptions(), 0.0)
    monkeypatch.undo()
    Ledger.open(tmp_path / "data", StoreOptions(), 0.0).close()


# Payloads that memory has no room for


def data(name: int) -> bytes:
    return b"%d " % name * 100


def filled(ledger: Ledger, *names: int) -> None:
    if ledger.store.run is None:
        ledger.store.register(run_parameters(batch_size=2))
        ledger.store.take(0.0)
    for name in names:
        ledger.store.put(GroupEntry(id=str(name), env=None, size=1, payload=data(name)), 0.0)
    ledger.settled().result(30)


def in_memory(ledger: Ledger) -> list[str]:
    return [item.entry.id for item in ledger.store.waiting if item.entry.payload.data is not None]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_written_leaves_memory_and_is_read_back(tmp_path: Path, restarted: bool) -> None:
    with ledger(tmp_path) as one:
        filled(one, *range(10, 18))
        assert in_memory(one) == []
        if not restarted:
            serve_all(one)
    if restarted:
        with ledger(tmp_path) as two:
            serve_all(two)


def serve_all(ledger: Ledger) -> None:
    assert ledger.store.status(0.0).held_bytes == 8 * len(data(10))
    for first in (10, 12, 14, 16):
        batch = some(ledger.store.take(0.0, lease=True))
        assert asyncio.run(read(batch.entries)) == [data(first), data(first + 1)]
        assert ledger.store.return_lease(batch.id, 0.0)
        again = some(ledger.store.take(0.0, lease=True))
        assert asyncio.run(read(again.entries)) == [data(first), data(first + 1)]
        assert ledger.store.acknowledge(again.id, 0.0)


def test_a_batch_dropped_while_it_is_read_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        filled(one, 1, 2)
        batch = some(one.store.take(0.0, lease=True))
        one.store.reset()
        one.settled().result(30)
        with pytest.raises(BrokerError, match="was dropped"):
            asyncio.run(read(batch.entries))


def test_the_space_of_trained_groups_is_used_again(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        for name in range(200):
            filled(one, name, name)
            batch = some(one.store.take(0.0, lease=True))
            one.store.acknowledge(batch.id, 0.0)
        one.settled().result(30)
        assert len(one.store.leases.over) <= 1000
        assert (tmp_path / "ledger.sqlite").stat().st_size < 2 << 20
