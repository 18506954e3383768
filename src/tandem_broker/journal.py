"""The queue's journal on disk: what was accepted survives kill -9 and a power cut.

One SQLite file. Changes are written as they happen, all in one transaction, which is committed before an answer that
promises them leaves: requests that are answered in one turn of the event loop share one flush of the disk. The store
lives in memory, payloads included; the file is read when a broker starts.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tandem.errors import BrokerError
from tandem_broker.protocol.messages import EnvRegistration
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue.records import BatchLease, Journal, State, StoreOptions
from tandem_broker.queue.store import GroupQueue
from tandem_broker.queue.tenants import Item, Tenant

APPLICATION = 0x54414E44
"""Marks the file as the broker's: "TAND"."""
FORMAT = 5
SCHEMA = (
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
    """CREATE TABLE IF NOT EXISTS entries (place INTEGER PRIMARY KEY, id TEXT NOT NULL, env INTEGER,
    size INTEGER NOT NULL, version INTEGER, state TEXT NOT NULL, batch TEXT)""",
    # A table of their own: SQLite writes the whole row again when one of its columns changes.
    "CREATE TABLE IF NOT EXISTS payloads (place INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)
ROWS = """SELECT place, id, env, size, version, state, batch, checksum, data
    FROM entries LEFT JOIN payloads USING (place) ORDER BY place"""
PAGE_BYTES = 32 << 10
"""Groups have some hundred KB: with SQLite's own 4 KiB a group takes twice the time."""


class Ledger(Journal):
    """A journal in a folder, and the store that it restores. Made by ``Ledger.open``."""

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        self.folder = folder
        self.path = folder / "ledger.sqlite"
        self.store = GroupQueue(options, journal=self)
        self._failure: Exception | None = None
        self._progress = ""
        self._inodes: dict[Path, int] = {}
        self._resources = ExitStack()
        self._resources.enter_context(_locked(folder))

    @classmethod
    def open(cls, folder: Path, options: StoreOptions, now: float) -> Ledger:
        """Open or create a ledger; the store is as it was after the last transaction.

        Raises:
            BrokerError: another broker uses it, or its file is damaged or another program's.
        """
        ledger = cls(folder, options)
        with ExitStack() as failed:
            failed.callback(ledger._resources.close)
            try:
                ledger._prepare()
                ledger._restore(now)
            except sqlite3.OperationalError as error:
                raise BrokerError(f"{ledger.path} cannot be opened ({error}); make room, or mend it") from error
            except (sqlite3.DatabaseError, ValueError, LookupError, TypeError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise BrokerError(f"{ledger.path} is damaged or no ledger ({why}); name another --data") from error
            ledger.commit()
            failed.pop_all()
        return ledger

    def close(self) -> None:
        """Write what was recorded and unlock the folder."""
        self.flush()
        self._resources.close()

    async def committed(self) -> None:
        """Have everything recorded so far on disk.

        Raises:
            BrokerError: it could not be written. The ledger takes nothing more; restart the broker when there is room.
        """
        await asyncio.sleep(0)  # others that are answered now share the flush
        self.commit()

    def flush(self) -> None:
        """Commit; a failure is told to whoever asks for a promise next."""
        with suppress(BrokerError):
            self.commit()

    def commit(self) -> None:
        """Flush the transaction, as ``committed`` promises."""
        progress = json.dumps(self.store.progress())
        if progress != self._progress:
            self._record("INSERT OR REPLACE INTO facts VALUES ('progress', ?)", [(progress,)])
            self._progress = progress
        if self._failure is None and self._sql.in_transaction:
            try:
                self._sql.commit()
                for path, inode in self._inodes.items():
                    if not path.exists() or path.stat().st_ino != inode:
                        raise FileNotFoundError(f"{path} was deleted or replaced while the broker ran")
            except (sqlite3.Error, OSError) as error:
                self._failure = error
        if self._failure is not None:
            raise BrokerError(
                f"{self.path} cannot be written ({self._failure}); nothing is accepted until the broker is restarted"
            )

    # --- what the store records ---

    def added(self, place: int, entry: GroupEntry, state: State) -> None:
        """Record an accepted entry."""
        row = (place, entry.id, entry.env, entry.size, entry.version, state, None)
        self._record("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", [row])
        self._record("INSERT INTO payloads VALUES (?, ?, ?)", [(place, zlib.crc32(entry.payload), entry.payload)])

    def moved(self, places: Sequence[int], state: State, batch: str | None) -> None:
        """Record a change of state; trained and dropped entries leave the ledger."""
        if state in ("trained", "dropped"):
            for table in ("entries", "payloads"):
                self._record(f"DELETE FROM {table} WHERE place = ?", [(place,) for place in places])
        else:
            changes = [(state, batch, place) for place in places]
            self._record("UPDATE entries SET state = ?, batch = ? WHERE place = ?", changes)

    def noted(self, name: str, value: Any) -> None:
        """Record a fact."""
        if value is None:
            self._record("DELETE FROM facts WHERE name = ?", [(name,)])
        else:
            self._record("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, json.dumps(value))])

    def cleared(self) -> None:
        """Record that everything was reset."""
        for table in ("entries", "payloads", "facts"):
            self._record(f"DELETE FROM {table}", [()])
        self._progress = ""

    def _record(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write these. A failure is told by the commit: until then nothing is promised, and afterwards nothing more."""
        if self._failure is None:
            try:
                self._sql.executemany(statement, rows)
            except sqlite3.Error as error:
                self._failure = error

    # --- opening ---

    def _prepare(self) -> None:
        """Check whose file it is and that it is whole, then make it ready.

        Raises:
            BrokerError: it has another format.
            ValueError: it is another program's, or damaged.
        """
        self._sql = sql = self._resources.enter_context(closing(sqlite3.connect(self.path)))
        os.chmod(self.path, 0o600)
        (application,) = sql.execute("PRAGMA application_id").fetchone()
        (tables,) = sql.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (version,) = sql.execute("PRAGMA user_version").fetchone()
        if tables and application != APPLICATION:
            raise ValueError("it belongs to another program")
        if tables and version != FORMAT:
            raise BrokerError(f"{self.path} has format {version}, expected {FORMAT}; use the Tandem that wrote it")
        sql.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        sql.execute("PRAGMA journal_mode = WAL")
        sql.execute("PRAGMA synchronous = FULL")
        if tables and (verdict := sql.execute("PRAGMA quick_check").fetchone()) != ("ok",):
            raise ValueError(verdict[0])
        sql.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            sql.execute(statement)
        sql.commit()
        self._inodes = {path: path.stat().st_ino for path in (self.path, Path(f"{self.path}-wal"))}

    def _restore(self, now: float) -> None:
        """Fill the store. Leases count from ``now``, and so do silences of environments that were not silent already.

        A batch that a trainer which never acknowledges had comes back.
        """
        store = self.store
        facts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in self._sql.execute("SELECT name, value FROM facts ORDER BY rowid"):
            kind, _, of = name.partition(":")
            facts[kind][of] = json.loads(value)
        for progress in facts["progress"].values():
            store.resume(progress)
        store.seen.update(facts["key"])
        for env_id, fact in sorted((int(env_id), fact) for env_id, fact in facts["env"].items()):
            spec = EnvRegistration(**fact.pop("spec"))
            store.tenants.add(Tenant(env_id=env_id, spec=spec, heard=now, **fact))
        for place, id, env, size, version, state, batch, checksum, data in self._sql.execute(ROWS):
            if state not in ("buffered", "queued", "leased") or size < 1:
                raise ValueError(f"a group of {size} sequences is {state}")
            if not isinstance(data, bytes) or zlib.crc32(data) != checksum:
                raise ValueError(f"the payload of group {place} is not what was written")
            entry = GroupEntry(id=id, env=env, size=size, version=version, payload=data)
            store.waiting.hold(Item(place, entry, store.tenants.of(env), state, batch))
        for fact in facts["lease"].values():
            store.restored(msgspec.convert(fact, BatchLease), now)


def _locked(folder: Path) -> BinaryIO:
    """Make a folder and lock it until the returned file is closed.

    Raises:
        BrokerError: another broker has the lock, or there can be none.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("ab")
    except OSError as error:
        raise BrokerError(f"no ledger can be kept in {folder}: {error}; name another folder with --data") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise BrokerError(f"another broker uses {folder}; give this one another folder, or end that one") from None
    return lock
