"""The store's journal on disk: what was accepted survives kill -9 and a power cut.

A folder with ``ledger.sqlite`` (``database``: WAL; environments, places, states) and payload files (``payloads``). One
thread writes: all events that came while it wrote the last time go into one transaction, so many submissions share one
flush of the disk. An answer may leave when ``settled`` says that what it promises is down.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tandem.broker.journal.database import Database, damaged, locked
from tandem.broker.journal.payloads import Memory, PayloadPlace, Payloads, StoredPayload
from tandem.broker.protocol.messages import RunParameters
from tandem.broker.queue.records import EnvSpec, GroupEntry, State, StoreOptions
from tandem.broker.queue.store import GroupQueue, lease_of
from tandem.broker.queue.tenants import Item, Tenant
from tandem.errors import BrokerError

log = logging.getLogger(__name__)

TRIM_EVERY = 500
"""Transactions between two removals of keys that are too old or too many."""
GATHER_SECONDS = 0.01
"""While more submissions are on their way, a transaction begins no sooner than this after the last one began."""
COMPANY_SECONDS = 0.001
"""How long a submission waits for another's first bytes: clients that were answered together come again together."""
ROWS = 16
"""Entries added by one statement: SQLite lets the interpreter go at each, and to have it back takes a while."""

Event = tuple[Any, ...]
"""Its first word is the kind: ("added", order, kept, entry, state, key, now), ("moved", orders, state, batch),
("noted", name, value) or ("cleared",)."""


class Ledger:
    """A journal in a folder, and the store that it keeps. Made by ``opened`` or ``Ledger.open``."""

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        self.folder = folder
        self.store = GroupQueue(options, journal=self)
        self._options = options
        self._lock = locked(folder)
        try:
            self._database = Database(folder / "ledger.sqlite")
            self._payloads = Payloads(folder / "payloads")
        except BaseException:
            os.close(self._lock)
            raise
        self.memory = Memory(options.memory_bytes)
        """Where payloads are."""
        self._turn = threading.Condition()
        self._events: list[Event] = []
        self._promise: Future[None] = _promise()
        self._last: Future[None] = _promise()
        self._last.set_result(None)
        self._shared: tuple[Future[None], asyncio.Future[None]] | None = None  # waiters of a promise wake at once
        self._failed: BrokerError | None = None
        self._closing = False
        self._hurried = False  # what was told shall be written now
        self.transactions = 0
        """Transactions written since it was opened."""
        self._writer = threading.Thread(target=self._work, name="broker-ledger", daemon=True)

    @classmethod
    def open(cls, folder: Path, options: StoreOptions, now: float) -> Ledger:
        """Open or begin a ledger; the store is as it was when the last transaction was written.

        Raises:
            BrokerError: another broker has it, or a file in it is damaged or not ours.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BrokerError(f"no ledger can be kept in {folder}: {error.strerror}; give another folder") from error
        ledger = cls(folder, options)
        try:
            ledger._restore(now)
        except sqlite3.OperationalError as error:
            ledger._let_go()
            raise BrokerError(
                f"the ledger in {folder} cannot be opened ({error}); make room on its disk, or mend it, and start again"
            ) from error
        except sqlite3.DatabaseError as error:
            ledger._let_go()
            raise damaged(folder / "ledger.sqlite", str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # what SQLite cannot know to be nonsense
            ledger._let_go()
            raise damaged(folder / "ledger.sqlite", f"{type(error).__name__}: {error}") from error
        except BaseException:
            ledger._let_go()
            raise
        ledger._writer.start()
        return ledger

    def close(self) -> None:
        """Write what was told and let the folder go."""
        with self._turn:
            self._closing = True
            self._turn.notify()
        if self._writer.ident is not None:
            self._writer.join()
        self._let_go()

    def settled(self) -> Future[None]:
        """Done when everything told so far is on disk, which is seen to now.

        The future raises BrokerError if it could not be written.
        """
        return self._settled(gather=False)

    def _settled(self, *, gather: bool) -> Future[None]:
        with self._turn:
            if not gather and self._events and not self._hurried:
                self._hurried = True
                self._turn.notify()
            return self._promise if self._events or self._failed else self._last

    async def committed(self, more: Callable[[], bool] | None = None) -> None:
        """Wait until everything told so far is on disk.

        Args:
            more: whether more submissions are on their way, which may go into the same transaction. None: it is
                written at once.

        Raises:
            BrokerError: it could not be written. The ledger takes nothing more; restart the broker when there is room.
        """
        if more is not None and not more():
            await asyncio.sleep(COMPANY_SECONDS)
        promise = self._settled(gather=more is not None and more())
        if promise.done():
            return promise.result()
        if self._shared is None or self._shared[0] is not promise:
            self._shared = (promise, asyncio.wrap_future(promise))
        await asyncio.shield(self._shared[1])  # one waiter's end is not the others'

    # --- what the store tells ---

    def added(self, order: int, entry: GroupEntry, state: State, key: str | None, now: float) -> StoredPayload:
        """An entry was accepted."""
        kept = StoredPayload(self._payloads, entry.payload)
        self._record(("added", order, kept, entry, state, key, now))
        return kept

    def moved(self, orders: Sequence[int], state: State, batch: str | None) -> None:
        """Entries changed state; trained and dropped ones leave the ledger."""
        self._record(("moved", list(orders), state, batch))

    def noted(self, name: str, value: Any) -> None:
        """A fact changed."""
        self._record(("noted", name, None if value is None else json.dumps(value)))

    def cleared(self) -> None:
        """Everything was reset."""
        self._record(("cleared",))

    def _record(self, event: Event) -> None:
        with self._turn:
            self._events.append(event)
            self._hurried |= event[0] != "added"
            if self._hurried or len(self._events) == 1:  # else the writer knows
                self._turn.notify()

    # --- the writer's thread ---

    def _work(self) -> None:
        began = -GATHER_SECONDS
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._events or self._closing)
                if not self._events:
                    return
                self._turn.wait_for(
                    lambda: self._hurried or self._closing, max(0.0, began + GATHER_SECONDS - time.monotonic())
                )
                events, promise = self._events, self._promise
                self._events, self._promise, self._last = [], _promise(), promise
                self._hurried = False
            began = time.monotonic()
            try:
                self._write(events)
            except Exception as error:
                self._fail(promise, error)
                return
            del events  # and with it payloads that leave memory
            promise.set_result(None)

    def _fail(self, promise: Future[None], error: Exception) -> None:
        """From now on nothing is promised: memory and disk no longer agree."""
        failed = BrokerError(
            f"the ledger in {self.folder} cannot be written ({error}); nothing is accepted any more: "
            "make room on its disk and restart the broker"
        )
        with self._turn:
            self._failed = failed
            promise.set_exception(failed)
            self._promise.set_exception(failed)

    def _write(self, events: list[Event]) -> None:
        mark = self._database.mark
        places = self._payloads.append([one[2].data for one in events if one[0] == "added"], mark)
        with self._database.transaction() as database:
            for kind, alike in groupby(events, key=itemgetter(0)):
                if kind == "added":
                    self._write_added(database, [(next(places), *rest) for _, *rest in alike])
                elif kind == "moved":
                    for _, *moved in alike:
                        self._write_moved(database, *moved)
                elif kind == "noted":
                    for _, *noted in alike:
                        self._database.note(*noted)
                else:
                    self._database.clear()
                    self._payloads.used.clear()
                    self.memory.clear()
            self.transactions += 1
            if self.transactions % TRIM_EVERY == 0:
                self._trim(database)
            self._gather(database)
        if self._payloads.is_gone:
            raise FileNotFoundError(f"{self.folder / 'payloads'} was deleted while the broker ran")
        self._payloads.remove_unused()

    def _write_added(self, database: sqlite3.Connection, added: Sequence[tuple[Any, ...]]) -> None:
        """Each of ``added`` is where a payload went, and what was told with it."""
        rows, keys = [], []
        for place, order, kept, entry, state, key, now in added:
            rows.append((order, entry.id, entry.env, entry.size, entry.version, entry.received, state, None, *place))
            self._payloads.use(place.file, place.length)
            self.memory.written(order, kept, place)
            if key is not None:
                keys.append((key, now))
        for first in range(0, len(rows), ROWS):
            some = rows[first : first + ROWS]
            values = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"] * len(some))
            database.execute(f"INSERT INTO entries VALUES {values}", list(chain.from_iterable(some)))
        self._database.entries += len(rows)
        database.executemany("INSERT OR REPLACE INTO keys VALUES (?, ?)", keys)

    def _write_moved(self, database: sqlite3.Connection, orders: list[int], state: State, batch: str | None) -> None:
        for order in orders:
            if state in ("trained", "dropped"):
                gone = database.execute("DELETE FROM entries WHERE place = ? RETURNING file, length", (order,))
                for file, length in gone.fetchall():
                    self._database.entries -= 1
                    self._payloads.use(file, -length)
                    self.memory.gone(order)
            else:
                database.execute("UPDATE entries SET state = ?, batch = ? WHERE place = ?", (state, batch, order))

    def _gather(self, database: sqlite3.Connection) -> None:
        """Old payloads that keep large files alive move to the newest file, so that the disk is given back."""
        sparsest = self._payloads.sparsest()
        if sparsest is None:
            return
        columns = "SELECT place, file, offset, length, checksum FROM entries WHERE file = ?"
        rows = database.execute(columns, (sparsest,)).fetchall()
        places = self._payloads.moved([PayloadPlace(*place) for _, *place in rows], self._database.mark)
        for (order, *_), place in zip(rows, places, strict=True):
            database.execute("UPDATE entries SET file = ?, offset = ? WHERE place = ?", (*place[:2], order))
            self._payloads.use(sparsest, -place.length)
            self._payloads.use(place.file, place.length)
            self.memory.moved(order, place)

    def _trim(self, database: sqlite3.Connection) -> None:
        database.execute(
            "DELETE FROM keys WHERE rowid <= (SELECT MAX(rowid) FROM keys) - ? OR at < (SELECT MAX(at) FROM keys) - ?",
            (self._options.max_keys, self._options.key_seconds),
        )

    # --- opening ---

    def _restore(self, now: float) -> None:
        self._database.prepare(payloads=self._payloads.holds)
        self._database.count(self._payloads.newest_mark())
        sql = self._database.sql
        facts = {name: json.loads(value) for name, value in sql.execute("SELECT name, value FROM facts ORDER BY rowid")}
        keys = sql.execute("SELECT key, at FROM keys ORDER BY rowid").fetchall()
        columns = (
            "SELECT place, id, env, size, version, received, state, batch, file, offset, length, checksum FROM entries"
        )
        rows = []
        for order, name, env, size, version, received, state, batch, *place in sql.execute(columns):
            if state not in ("buffered", "queued", "leased") or size < 1:
                raise ValueError(f"a group of {size} sequences is {state}")
            kept = StoredPayload(self._payloads, place=self._payloads.known(PayloadPlace(*place)))
            self.memory.restored(order, kept)
            entry = GroupEntry(id=name, env=env, size=size, version=version, received=received, payload=kept)
            rows.append((order, entry, state, batch))
        restore(self.store, facts, rows, keys, now)
        self._payloads.remove_unused()
        if latest := self.store.latest:  # an example that may be asked for when it is no longer held
            try:
                self.store.waiting.latest = replace(latest, payload=self._payloads.read(latest.payload.place))
            except (BrokerError, FileNotFoundError) as error:
                log.error("%s", error)
                self.store.waiting.latest = None

    def _let_go(self) -> None:
        self._payloads.close()
        self._database.sql.close()
        os.close(self._lock)


@contextmanager
def opened(folder: Path | None, options: StoreOptions, now: float) -> Iterator[Ledger | None]:
    """A ledger that is closed at the end; None stays None (a store without a ledger lives in memory alone)."""
    if folder is None:
        yield None
        return
    ledger = Ledger.open(folder, options, now)
    try:
        yield ledger
    finally:
        ledger.close()


def _promise() -> Future[None]:
    """A future that a waiter that goes away cannot cancel for the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def restore(
    store: GroupQueue,
    facts: Mapping[str, Any],
    rows: Iterable[tuple[int, GroupEntry, State, str | None]],
    keys: Iterable[tuple[str, float]],
    now: float,
) -> None:
    """Fill a new store. Leases count from ``now``, and so do silences of environments that were not silent already.

    A batch that a trainer which never acknowledges had, and whose answer is not known to have gone out, comes back.

    Args:
        store: As constructed.
        facts: What was noted, by name.
        rows: ``(order, entry, state, batch)`` of every entry that is not trained or dropped, in any order.
        keys: Idempotency keys and when they came, oldest first.
        now: Seconds.
    """
    progress = facts.get("progress", {})
    if facts.get("run"):
        store.run = RunParameters(**facts["run"])
        store.tenants.batch_size = store.run.batch_size
    store.started, store.step = progress.get("started", False), progress.get("step", 0)
    store.policy, store.returned = progress.get("policy"), progress.get("returned", 0)
    store.took = progress.get("took", False)
    store.tenants.names.update(facts.get("names", progress.get("names", {})))
    for key, at in keys:
        store.seen.add(key, at)
    envs = {int(name.removeprefix("env:")): fact for name, fact in facts.items() if name.startswith("env:")}
    for env_id in sorted(envs):
        _tenant(store, env_id, envs[env_id], now)
    store.tenants.next_id = max(store.tenants.next_id, progress.get("next_id", 0))
    items = _items(store, rows)
    store.order = max([progress.get("order", 0), *(order + 1 for order in items)])
    counts = store.counts
    counts.update(progress.get("counts", {}))
    counts["accepted"] = counts["trained"] + counts["dropped"] + len(items)
    for name, fact in facts.items():
        if name.startswith("lease:"):
            _lease(store, name.removeprefix("lease:"), fact, items, now)
    store.tenants.recount()


def _tenant(store: GroupQueue, env_id: int, fact: Mapping[str, Any], now: float) -> None:
    store.tenants.add(
        Tenant(
            env_id=env_id,
            spec=EnvSpec(**fact["spec"]),
            name=fact["name"],
            heard=now,
            key=fact["key"],
            owner=fact.get("owner", ""),
            connected=fact["connected"],
            live=fact.get("live", fact["connected"]),
        )
    )


def _items(store: GroupQueue, rows: Iterable[tuple[int, GroupEntry, State, str | None]]) -> dict[int, Item]:
    """Every entry in its place, by its order of arrival."""
    items = {}
    for order, entry, state, batch in sorted(rows, key=lambda row: row[0]):
        item = Item(order, entry.size, entry.num_bytes, entry, store.tenants.of(entry.env), state, batch)
        items[order] = item
        store.waiting.hold(item)
        if state == "buffered":
            store.waiting.buffer(item)
        elif state == "queued":
            store.waiting.enqueue([item])
    return items


def _lease(store: GroupQueue, name: str, fact: dict[str, Any], items: Mapping[int, Item], now: float) -> None:
    lease = lease_of(name, fact, items, now)
    if not any(item.batch == name and item.state == "leased" for item in lease.items):
        store.leases.over[name] = lease
        return
    store.leases.out[name] = lease
    if lease.seconds is None and not lease.delivered:
        store.release(name, now)
