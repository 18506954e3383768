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

TRIM = """DELETE FROM keys
    WHERE rowid <= (SELECT MAX(rowid) FROM keys) - ? OR at < (SELECT MAX(at) FROM keys) - ?"""
TRIM_EVERY = 500
"""Transactions between two removals of keys that are too old or too many."""

Statement = tuple[str, Sequence[tuple[Any, ...]]]
"""SQL, and the rows that it is executed with."""


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
        self._statements: list[Statement] = []
        self._unwritten: list[StoredPayload] = []
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
            raise BrokerError(
                f"no ledger can be kept in {folder}: {error.strerror}; name another folder with --data"
            ) from error
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
            return self._promise if self._statements or self._failed else self._last

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
        data, num_bytes = entry.payload, len(entry.payload)
        row = (place, entry.id, entry.env, entry.size, entry.version, entry.received, state, None, num_bytes)
        payload = StoredPayload(self._database, place, num_bytes, data)
        self._record(
            ("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [row]),
            ("INSERT INTO payloads VALUES (?, ?, ?)", [(place, zlib.crc32(data), data)]),
            ("INSERT OR REPLACE INTO keys VALUES (?, ?)", [] if key is None else [(key, now)]),
            payload=payload,
        )
        return payload

    def moved(self, places: Sequence[int], state: State, batch: str | None) -> None:
        """Record a change of state; trained and dropped entries leave the ledger."""
        if state in ("trained", "dropped"):
            rows = [(place,) for place in places]
            self._record(*((f"DELETE FROM {table} WHERE place = ?", rows) for table in ("entries", "payloads")))
        else:
            changes = [(state, batch, place) for place in places]
            self._record(("UPDATE entries SET state = ?, batch = ? WHERE place = ?", changes))

    def noted(self, name: str, value: Any) -> None:
        """Record a fact."""
        if value is None:
            self._record(("DELETE FROM facts WHERE name = ?", [(name,)]))
        else:
            self._record(("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, json.dumps(value))]))

    def cleared(self) -> None:
        """Record that everything was reset."""
        self._record(*((f"DELETE FROM {table}", [()]) for table in ("entries", "payloads", "facts", "keys")))

    def _record(self, *statements: Statement, payload: StoredPayload | None = None) -> None:
        """Have these written, all in one transaction."""
        with self._turn:
            self._statements += statements
            self._unwritten += [payload] if payload else []
            self._turn.notify()

    # --- the writer's thread ---

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._statements or self._closing)
                if not self._statements:
                    return
                statements, payloads, promise = self._statements, self._unwritten, self._promise
                self._statements, self._unwritten, self._promise, self._last = [], [], _promise(), promise
            try:
                self._write(statements)
            except Exception as error:
                self._fail(promise, error)
                return
            for payload in payloads:
                payload.data = None
            del statements, payloads
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

    def _write(self, statements: Sequence[Statement]) -> None:
        with self._database.transaction() as sql:
            for statement, rows in statements:
                sql.executemany(statement, rows)
            self.transactions += 1
            if self.transactions % TRIM_EVERY == 0:
                sql.execute(TRIM, (self._options.max_keys, self._options.key_seconds))

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
def opened(folder: Path | None, options: StoreOptions, now: float) -> Iterator[GroupQueue]:
    """Open the queue that a folder keeps, for a block; without a folder it lives in memory alone."""
    if folder is None:
        yield GroupQueue(options)
        return
    ledger = Ledger.open(folder, options, now)
    try:
        yield ledger.store
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
