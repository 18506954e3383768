"""The ledger: what it promised is there after a restart and after kill -9; what is not its own it refuses."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import broker_kills
import msgspec
import pytest
from support.brokers import env_spec, run_parameters, some

from tandem.errors import BrokerError
from tandem_broker.journal import Ledger
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue.records import StoreOptions

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
    entry = GroupEntry(id=name, env=env, size=size, version=3, payload=data or name.encode())
    return ledger.store.put(entry, 0.0, key=key).kind


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        ticket = some(one.store.register_env(env_spec(name="e", max_token_length=8, group_size=4), 0.0, key="me"))
        assert put(one, "a", key="k") == "received"
        assert put(one, "b") == "received"
        assert put(one, "c", size=3, env=0) == "buffered"
        batch = some(one.store.take(0.0, lease=10.0, policy=6))
    with ledger(tmp_path, now=100.0) as two:
        store = two.store
        assert (store.run, store.step, store.started, store.policy_step) == (RUN, 1, True, 6)
        known = store.register_env(env_spec(name="e", max_token_length=8, group_size=4), 100.0, key="me")
        assert known == msgspec.structs.replace(ticket, starting_step=7)  # the one after the six that the trainer told
        again = some(store.register_env(env_spec(name="e", max_token_length=8), 100.0))
        assert (again.env_id, again.wandb_name) == (1, "e_1")
        assert put(two, "a", key="k") == "duplicate"
        second_batch = some(store.take(100.0, lease=600.0))
        (entry,) = second_batch.entries
        assert entry == GroupEntry(id="b", env=None, size=4, version=3, payload=b"b")
        assert store.acknowledge(batch.id, 109.0) == ""  # its lease began anew
        assert [item.entry.id for item in store.waiting.of("buffered")] == ["c"]


def test_an_environment_that_was_silent_holds_no_share_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        for name in ("gone", "here"):
            assert one.store.register_env(env_spec(name=name, max_token_length=8, min_batch_allocation=0.25), 0.0)
        one.store.status_env(1, 100.0)
    with ledger(tmp_path, now=101.0) as two:
        assert [env["connected"] for env in two.store.status(101.0)["envs"]] == [False, True]
        assert two.store.status_env(0, 102.0).unallocated_fraction == 0.5  # it spoke
    with ledger(tmp_path, now=103.0) as three:
        assert [env["connected"] for env in three.store.status(103.0)["envs"]] == [True, True]


def test_a_plain_trainers_batch_is_served_again_unless_its_answer_went_out(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        put(one, "b")
        assert one.store.take(0.0)
    with ledger(tmp_path) as two:
        after = some(two.store.take(0.0))
        assert [entry.id for entry in after.entries] == ["a"]
        assert two.store.step == 1


def test_a_lease_that_ran_out_stays_over_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        first = some(one.store.take(0.0, lease=10.0))
        second = some(one.store.take(10.0, lease=600.0))
    with ledger(tmp_path) as two:
        assert list(two.store.leases) == [second.id]
        assert two.store.acknowledge(first.id, 0.0) == ""  # late, but the first to say so
        assert "trained by another batch" in two.store.acknowledge(second.id, 0.0)
        assert two.store.take(0.0) is None


def test_a_reset_leaves_nothing(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a", key="k", data=b"x" * 1000)
        one.commit()
        one.store.reset()
        begun(one)
        put(one, "b", key="k")
    with ledger(tmp_path) as two:
        assert [item.entry.id for item in two.store.waiting.of("queued")] == ["b"]


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


def test_a_ledger_that_cannot_write_promises_nothing_more(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "kept")
        one.commit()
        one._sql.execute("PRAGMA max_page_count = 1")
        put(one, "lost", data=b"x" * (1 << 20))
        with pytest.raises(BrokerError, match="is full"):
            one.commit()
        put(one, "later")
        with pytest.raises(BrokerError, match="nothing is accepted"):
            one.commit()
    with ledger(tmp_path) as two:
        assert [item.entry.id for item in two.store.waiting.of("queued")] == ["kept"]


def test_keys_do_not_pile_up(tmp_path: Path) -> None:
    with ledger(tmp_path, options=StoreOptions(max_keys=5)) as one:
        begun(one)
        for k in range(20):
            put(one, str(k), key=str(k))
            one.commit()
    with ledger(tmp_path) as two:
        assert len(two.store.seen) == 6
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
        "from tandem_broker.journal import Ledger\nfrom tandem_broker.queue.records import StoreOptions\n"
        "Ledger.open(pathlib.Path(sys.argv[1]), StoreOptions(), 0.0)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    with ledger(tmp_path):
        pass


def test_a_full_disk_at_the_start_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **more: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Ledger, "_prepare", full)
    with pytest.raises(BrokerError, match=r"cannot be opened \(database or disk is full\); make room"):
        Ledger.open(tmp_path / "data", StoreOptions(), 0.0)
    monkeypatch.undo()
    Ledger.open(tmp_path / "data", StoreOptions(), 0.0).close()


def test_the_space_of_trained_groups_is_used_again(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        for name in range(200):
            put(one, str(name), data=b"%d " % name * 200)
            batch = some(one.store.take(0.0, lease=600.0))
            one.store.acknowledge(batch.id, 0.0)
        one.commit()
        assert len(one.store.over) <= 1000
        assert (tmp_path / "ledger.sqlite").stat().st_size < 2 << 20
