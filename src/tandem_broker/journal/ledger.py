"""The queue's journal on disk: what was accepted survives kill -9 and a power cut.

One thread writes. Everything recorded while it wrote the last time goes into one transaction, so many submissions
share one flush of the disk. An answer may leave once ``settled`` says that what it promises is written.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.errors import BrokerError
from tandem_broker.journal.database import Database, damaged, locked
from tandem_broker.journal.restore import restore
from tandem_broker.queue.records import GroupEntry, Journal, State, StoreOptions
from tandem_broker.queue.store import GroupQueue

TRIM_EVERY = 500
"""Transactions between two removals of keys that are too old or too many."""

Event = tuple[Any, ...]
"""Begins with its kind: ("added", place, payload, entry, state, key, now), ("moved", places, state, batch),
("noted", name, value) or ("cleared",)."""


class StoredPayload:
    """A payload of the ledger: in memory until it is written, then in the database."""

    __slots__ = ("_database", "data", "num_bytes", "place")

    def __init__(self, database: Database, place: int, num_bytes: int, data: bytes | None = None) -> None:
        self._database = database
        self.place = place
        self.num_bytes = num_bytes
        self.data = data

    def __len__(self) -> int:
        return self.num_bytes

    def read(self) -> bytes:
        """Return the bytes; raises BrokerError if the disk does not have them as they were written."""
        data = self.data
        return self._database.payload(self.place) if data is None else data


class Ledger(Journal):
    """A journal in a folder, and the store that it restores. Made by ``Ledger.open``."""

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        self.folder = folder
        self.store = GroupQueue(options, journal=self)
        self.transactions = 0
        self._options = options
        self._lock = locked(folder)
        try:
            self._database = Database(folder / "ledger.sqlite")
        except BaseException:
            os.close(self._lock)
            raise
        self._turn = threading.Condition()
        self._events: list[Event] = []
        self._promise = _promise()
        self._last = _promise()
        self._last.set_result(None)
        self._failed = False
        self._closing = False
        self._writer = threading.Thread(target=self._work, name="broker-ledger", daemon=True)

    @classmethod
    def open(cls, folder: Path, options: StoreOptions, now: float) -> Ledger:
        """Open or create a ledger; the store is as it was after the last transaction.

        Raises:
            BrokerError: another broker uses it, or its file is damaged or another program's.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BrokerError(f"no ledger can be kept in {folder}: {error.strerror}; give another folder") from error
        ledger = cls(folder, options)
        path = folder / "ledger.sqlite"
        try:
            ledger._restore(now)
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError, AttributeError) as error:
            ledger._close()
            if not isinstance(error, sqlite3.OperationalError):  # a damaged file, or rows that SQLite finds whole
                raise damaged(path, f"{type(error).__name__}: {error}") from error
            raise BrokerError(
                f"the ledger in {folder} cannot be opened ({error}); make room on its disk, or mend it, and start again"
            ) from error
        except BaseException:
            ledger._close()
            raise
        ledger._writer.start()
        return ledger

    def close(self) -> None:
        """Write what was recorded and unlock the folder."""
        with self._turn:
            self._closing = True
            self._turn.notify()
        self._writer.join()
        self._close()

    def settled(self) -> Future[None]:
        """Return a future that is done once everything recorded so far is on disk; BrokerError if it cannot be."""
        with self._turn:
            return self._promise if self._events or self._failed else self._last

    async def committed(self) -> None:
        """Wait until everything recorded so far is on disk.

        Raises:
            BrokerError: it could not be written. The ledger takes nothing more; restart the broker when there is room.
        """
        promise = self.settled()
        if not promise.done():
            await asyncio.wrap_future(promise)
        promise.result()

    # --- what the store records ---

    def added(self, place: int, entry: GroupEntry, state: State, key: str | None, now: float) -> StoredPayload:
        """Record an accepted entry."""
        payload = StoredPayload(self._database, place, len(entry.payload), entry.payload)
        self._record(("added", place, payload, entry, state, key, now))
        return payload

    def moved(self, places: Sequence[int], state: State, batch: str | None) -> None:
        """Record a change of state; trained and dropped entries leave the ledger."""
        self._record(("moved", list(places), state, batch))

    def noted(self, name: str, value: Any) -> None:
        """Record a fact."""
        self._record(("noted", name, None if value is None else json.dumps(value)))

    def cleared(self) -> None:
        """Record that everything was reset."""
        self._record(("cleared",))

    def _record(self, event: Event) -> None:
        with self._turn:
            self._events.append(event)
            self._turn.notify()

    # --- the writer's thread ---

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._events or self._closing)
                if not self._events:
                    return
                events, promise = self._events, self._promise
                self._events, self._promise, self._last = [], _promise(), promise
            try:
                self._write(events)
            except Exception as error:
                self._fail(promise, error)
                return
            del events  # and with it their payloads
            promise.set_result(None)

    def _fail(self, promise: Future[None], error: Exception) -> None:
        """Promise nothing from now on: memory and disk no longer agree."""
        failed = BrokerError(
            f"the ledger in {self.folder} cannot be written ({error}); nothing is accepted any more: "
            "make room on its disk and restart the broker"
        )
        with self._turn:
            self._failed = True
            promise.set_exception(failed)
            self._promise.set_exception(failed)

    def _write(self, events: Sequence[Event]) -> None:
        with self._database.transaction() as sql:
            for kind, *event in events:
                getattr(self, f"_write_{kind}")(sql, *event)
            self.transactions += 1
            if self.transactions % TRIM_EVERY == 0:
                self._trim(sql)
        for kind, *event in events:
            if kind == "added":
                event[1].data = None

    def _write_added(
        self, sql: sqlite3.Connection, place: int, payload: StoredPayload, entry: GroupEntry, state: State,
        key: str | None, now: float,
    ) -> None:  # fmt: skip
        row = (place, entry.id, entry.env, entry.size, entry.version, entry.received, state, None, len(payload))
        sql.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        sql.execute("INSERT INTO payloads VALUES (?, ?, ?)", (place, zlib.crc32(entry.payload), entry.payload))
        if key is not None:
            sql.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (key, now))

    def _write_moved(self, sql: sqlite3.Connection, places: list[int], state: State, batch: str | None) -> None:
        for place in places:
            if state in ("trained", "dropped"):
                sql.execute("DELETE FROM entries WHERE place = ?", (place,))
                sql.execute("DELETE FROM payloads WHERE place = ?", (place,))
            else:
                sql.execute("UPDATE entries SET state = ?, batch = ? WHERE place = ?", (state, batch, place))

    def _write_noted(self, sql: sqlite3.Connection, name: str, value: str | None) -> None:
        if value is None:
            sql.execute("DELETE FROM facts WHERE name = ?", (name,))
        else:
            sql.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _write_cleared(self, sql: sqlite3.Connection) -> None:
        for table in ("entries", "payloads", "facts", "keys"):
            sql.execute(f"DELETE FROM {table}")

    def _trim(self, sql: sqlite3.Connection) -> None:
        sql.execute(
            "DELETE FROM keys WHERE rowid <= (SELECT MAX(rowid) FROM keys) - ? OR at < (SELECT MAX(at) FROM keys) - ?",
            (self._options.max_keys, self._options.key_seconds),
        )

    # --- opening and closing ---

    def _restore(self, now: float) -> None:
        self._database.prepare()
        sql = self._database.sql
        facts = {name: json.loads(value) for name, value in sql.execute("SELECT name, value FROM facts ORDER BY rowid")}
        rows = []
        for place, id, env, size, version, received, state, batch, num_bytes in sql.execute("SELECT * FROM entries"):
            if state not in ("buffered", "queued", "leased") or size < 1 or num_bytes < 0:
                raise ValueError(f"a group of {size} sequences is {state}")
            payload = StoredPayload(self._database, place, num_bytes)
            entry = GroupEntry(id=id, env=env, size=size, version=version, received=received, payload=payload)
            rows.append((place, entry, state, batch))
        restore(self.store, facts, rows, sql.execute("SELECT key, at FROM keys ORDER BY rowid"), now)

    def _close(self) -> None:
        self._database.close()
        os.close(self._lock)


def _promise() -> Future[None]:
    """A future that a waiter cannot cancel for the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


@contextmanager
def opened(folder: Path | None, options: StoreOptions, now: float) -> Iterator[Ledger | None]:
    """Open a ledger for a block; without a folder there is none, and the store lives in memory alone."""
    if folder is None:
        yield None
        return
    ledger = Ledger.open(folder, options, now)
    try:
        yield ledger
    finally:
        ledger.close()


async def read(entries: Sequence[GroupEntry]) -> list[bytes]:
    """Read the payloads of entries, in a thread if some are on disk alone.

    Raises:
        BrokerError: one is not on disk as it was written.
    """
    payloads = [entry.payload for entry in entries]
    if any(isinstance(payload, StoredPayload) and payload.data is None for payload in payloads):
        return await asyncio.to_thread(_read, payloads)
    return _read(payloads)


def _read(payloads: Sequence[bytes | StoredPayload]) -> list[bytes]:
    return [payload.read() if isinstance(payload, StoredPayload) else payload for payload in payloads]
