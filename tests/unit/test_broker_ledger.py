"""The ledger: what it promised is there after a restart and after kill -9; what is not its own it refuses."""

from __future__ import annotations

import asyncio
import importlib.util
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from brokers import run_parameters
from msgspec.structs import replace
from tiers import long_but

from tandem.broker.journal import ledger as ledgers
from tandem.broker.journal import payloads
from tandem.broker.journal.ledger import Ledger
from tandem.broker.journal.payloads import PayloadReader
from tandem.broker.queue.records import EnvSpec, GroupEntry, GroupRefused, StoreOptions
from tandem.errors import BrokerError

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
    return [replace(entry, payload=data) for entry, data in zip(entries, PayloadReader(entries).bytes(), strict=True)]


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "payloads").iterdir())


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        ticket = one.store.register_env(EnvSpec(name="e", max_token_length=8, group_size=4), 0.0, key="me")
        assert put(one, "a", key="k") == "received"
        assert put(one, "b") == "received"
        assert put(one, "c", size=3, env=0) == "buffered"
        batch = one.store.take(0.0, lease=True, seconds=10.0, policy=6)
        assert batch is not None
    with ledger(tmp_path, now=100.0) as two:
        store = two.store
        assert (store.run, store.step, store.started, store.policy_step) == (RUN, 1, True, 6)
        known = store.register_env(EnvSpec(name="e", max_token_length=8, group_size=4), 100.0, key="me")
        assert ticket is not None
        assert known == msgspec.structs.replace(ticket, starting_step=7)  # the one after the six that the trainer told
        again = store.register_env(EnvSpec(name="e", max_token_length=8), 100.0)
        assert again is not None
        assert (again.env_id, again.wandb_name) == (1, "e_1")
        assert put(two, "a", key="k") == "duplicate"
        second_batch = store.take(100.0, lease=True)
        assert second_batch is not None
        assert loaded(second_batch.entries) == [
            GroupEntry(id="b", env=None, size=4, version=3, received=5.0, payload=b"b")
        ]
        assert store.acknowledge(batch.id, 109.0)  # its lease began anew
        assert [item.entry.id for item in store.tenants.by_id[0].buffer] == ["c"]


def test_an_environment_that_was_silent_holds_no_share_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        for name in ("gone", "here"):
            assert one.store.register_env(EnvSpec(name=name, max_token_length=8, min_batch_allocation=0.25), 0.0)
        one.store.status_env(1, 100.0)
    with ledger(tmp_path, now=101.0) as two:
        assert [env.connected for env in two.store.status(101.0).envs] == [False, True]
        assert two.store.status_env(0, 102.0).unallocated_fraction == 0.5  # it spoke
    with ledger(tmp_path, now=103.0) as three:
        assert [env.connected for env in three.store.status(103.0).envs] == [True, True]


def test_partial_groups_that_were_joined_are_still_joined_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        one.store.register_env(EnvSpec(name="e", max_token_length=8, group_size=4), 0.0)
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
        batch = one.store.take(0.0, trainer="t")
        assert batch is not None
        if delivered:
            one.store.delivered(batch.id)
    with ledger(tmp_path) as two:
        after = two.store.take(0.0, trainer="t")
        assert after is not None
        assert [entry.id for entry in after.entries] == (["b"] if delivered else ["a"])
        assert two.store.step == (2 if delivered else 1)
        assert two.store.counts["trained"] == int(delivered)


def test_a_kill_between_two_events_strands_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's thread may end a transaction after any of them."""
    heard = Ledger._record

    def cut_off(events: int) -> int:
        """Kill it after so many events; returns how many there would have been."""
        num_events = 0

        def record(self: Ledger, event: ledgers.Event) -> None:
            nonlocal num_events
            num_events += 1
            if num_events <= events:
                heard(self, event)

        monkeypatch.setattr(Ledger, "_record", record)
        with ledger(tmp_path / str(events)) as one:
            begun(one)
            put(one, "a")
            put(one, "b")
            first = one.store.take(0.0, lease=True)
            assert first is not None
            one.store.acknowledge(first.id, 0.0)
            second = one.store.take(0.0, lease=True)
            assert second is not None
            one.store.release(second.id, 0.0)
        monkeypatch.setattr(Ledger, "_record", heard)
        with ledger(tmp_path / str(events)) as two:
            out = [item for lease in two.store.leases.out.values() for item in lease.items]
            assert two.store.waiting.groups == len(list(two.store.waiting)) + len(out)
        return num_events

    all_events = cut_off(10_000)
    for events in range(all_events):
        cut_off(events)


def test_a_lease_that_ran_out_stays_over_after_a_restart(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        first = one.store.take(0.0, lease=True, seconds=10.0)
        second = one.store.take(10.0, lease=True)
    with ledger(tmp_path) as two:
        assert first is not None
        assert second is not None
        assert list(two.store.leases.out) == [second.id]
        assert two.store.acknowledge(first.id, 0.0)  # late, but the first to say so
        assert not two.store.acknowledge(second.id, 0.0)
        assert two.store.take(0.0) is None


def test_a_late_acknowledgement_after_a_restart_is_told_who_was_first(tmp_path: Path) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        put(one, "a")
        first = one.store.take(0.0, lease=True, seconds=10.0)
        second = one.store.take(10.0, lease=True)
        assert first is not None
        assert second is not None
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
        batch = one.store.take(0.0, lease=True)
        assert batch is not None
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


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    with ledger(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        file.execute("PRAGMA user_version = 2")
    file.close()
    with pytest.raises(BrokerError, match="has format 2"):
        Ledger.open(tmp_path, StoreOptions(), 0.0)


@pytest.mark.parametrize("damage", ["text", "hole", "cut", "gone"])
def test_a_damaged_ledger_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    with ledger(tmp_path) as one:
        begun(one)
        for k in range(200):
            put(one, str(k), data=b"x" * 500)
    main, (payloads,) = tmp_path / "ledger.sqlite", [p for p in (tmp_path / "payloads").iterdir() if p.stat().st_size]
    with ledger(tmp_path) as one:
        put(one, "in another file")
    if damage == "text":
        main.write_text("hello " * 1000)
    elif damage == "hole":
        content = bytearray(main.read_bytes())
        content[4096 + 100 : -100] = b"\xff" * (len(content) - 4296)
        main.write_bytes(content)
    elif damage == "cut":
        payloads.write_bytes(payloads.read_bytes()[:-4097])  # a file ends with up to a block of nothing
    else:
        payloads.unlink()
    with pytest.raises(BrokerError, match="damaged") as refused:
        Ledger.open(tmp_path, StoreOptions(), 0.0)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    with pytest.raises(BrokerError, match="damaged"):  # and the lock was given back
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
    def full(self: object, payload: bytes) -> None:
        raise OSError(28, "No space left on device")

    with ledger(tmp_path) as one:
        begun(one)
        put(one, "kept")
        one.settled().result(10)
        with monkeypatch.context() as patch:
            patch.setattr(payloads.Payloads, "_write", full)
            put(one, "lost")
            with pytest.raises(BrokerError, match="No space left on device"):
                one.settled().result(10)
        put(one, "later")
        with pytest.raises(BrokerError, match="nothing is accepted"):
            one.settled().result(10)
    with ledger(tmp_path) as two:
        assert [item.entry.id for item in two.store.waiting] == ["kept"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", long_but([0, 1 << 20], 0))
def test_the_disk_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Many times what is held goes through; one old group among each file's worth stays and is moved."""
    monkeypatch.setattr(payloads, "FILE_BYTES", 10_000)
    with ledger(tmp_path, options=StoreOptions(max_keys=100, memory_bytes=memory)) as one:
        begun(one)
        one.store.register_env(EnvSpec(name="e", max_token_length=8, group_size=3), 0.0)
        most = 0
        for k in range(600):
            if k % 20 == 0:
                put(one, f"old{k}", size=2, env=0, data=b"o" * 100)
            put(one, str(k), key=str(k), data=b"x" * 1000)
            batch = one.store.take(0.0, lease=True)
            assert batch is not None
            assert len(loaded(batch.entries)[0].payload) >= 100
            one.store.acknowledge(batch.id, 0.0)
            one.settled().result(10)
            most = max(most, on_disk(tmp_path))
        assert most < 2 * 30 * 1100 + 6 * 10_000
        assert len(one.store.leases.over) <= 1000
    with ledger(tmp_path) as two:
        held = [item.entry for item in two.store.waiting]
        assert len(held) == 30
        assert all(entry.payload == b"o" * 100 for entry in loaded(held))


def test_keys_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.broker.journal.ledger.TRIM_EVERY", 1)
    with ledger(tmp_path, options=StoreOptions(max_keys=5)) as one:
        begun(one)
        for k in range(20):
            put(one, str(k), key=str(k))
            one.settled().result(10)
    with ledger(tmp_path) as two:
        assert len(two.store.seen) == 5
        assert put(two, "x", key="19") == "duplicate"


def kill_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("broker_kills", ROOT / "tests" / "long" / "broker_kills.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_nothing_promised_is_lost_by_kill_minus_nine(tmp_path: Path, long: bool) -> None:
    """Kills at random moments under load; a child process answers as the broker would."""
    kills = 8 if long else 3
    tally = kill_script().against_a_child(tmp_path, kills=kills, seed=0)
    assert tally.kills == kills
    assert tally.accepted > 30  # few, so that a busy machine manages them
    assert tally.acknowledged > 5
    assert tally.lost == tally.doubled == 0


def test_a_broker_that_is_killed_lets_the_folder_go(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from tandem.broker.journal.ledger import Ledger\nfrom tandem.broker.queue.records import StoreOptions\n"
        "Ledger.open(pathlib.Path(sys.argv[1]), StoreOptions(), 0.0)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    with ledger(tmp_path):
        pass


# One transaction for many


def always() -> bool:
    return True


async def _elsewhere() -> None:
    """Let other threads work."""
    await asyncio.to_thread(lambda: None)


def test_submissions_go_into_one_transaction_while_more_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "GATHER_SECONDS", 600.0)
    number = 3 * ledgers.ROWS + 2

    async def scene(one: Ledger) -> None:
        put(one, "first")
        await asyncio.wait_for(one.committed(always), 10)  # nobody was before it: it waits for nobody
        before, waits = one.transactions, []
        for i in range(number):
            put(one, f"g{i}", key=f"k{i}")
            waits.append(asyncio.ensure_future(one.committed(always)))
            await _elsewhere()
        assert one.transactions == before
        await asyncio.wait_for(one.committed(), 10)
        await asyncio.gather(*waits)
        assert one.transactions == before + 1

    with ledger(tmp_path) as one:
        asyncio.run(scene(one))
    with ledger(tmp_path) as two:
        entries = [item.entry for item in two.store.waiting]
        assert [entry.id for entry in entries] == ["first", *(f"g{i}" for i in range(number))]
        assert [entry.payload for entry in loaded(entries)] == [entry.id.encode() for entry in entries]
        assert put(two, "again", key=f"k{number - 1}") == "duplicate"


def test_what_is_no_submission_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that a trainer has must be known after a kill, whoever else is about to submit."""
    monkeypatch.setattr(ledgers, "GATHER_SECONDS", 600.0)

    async def scene(one: Ledger) -> None:
        put(one, "a")
        await asyncio.wait_for(one.committed(), 10)
        put(one, "b")
        assert one.store.take(0.0) is not None
        await asyncio.wait_for(one.committed(always), 10)

    with ledger(tmp_path) as one:
        begun(one)
        asyncio.run(scene(one))


def test_a_submission_alone_does_not_wait_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "GATHER_SECONDS", 600.0)

    async def scene(one: Ledger) -> None:
        for name in ("a", "b"):
            put(one, name)
            await asyncio.wait_for(one.committed(lambda: False), 10)

    with ledger(tmp_path) as one:
        asyncio.run(scene(one))
        assert one.transactions == 2


def test_the_end_does_not_wait_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "GATHER_SECONDS", 600.0)
    with ledger(tmp_path) as one:
        put(one, "a")
        one.settled().result(10)
        put(one, "b")
    with ledger(tmp_path) as two:
        assert [item.entry.id for item in two.store.waiting] == ["a", "b"]


def test_a_full_disk_at_the_start_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **more: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ledgers.Database, "prepare", full)
    with pytest.raises(BrokerError, match=r"cannot be opened \(database or disk is full\); make room"):
        Ledger.open(tmp_path / "data", StoreOptions(), 0.0)
    monkeypatch.undo()
    Ledger.open(tmp_path / "data", StoreOptions(), 0.0).close()
