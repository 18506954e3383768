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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tandem.errors import BrokerError
from tandem_broker.protocol.messages import EnvRegistration, RunParameters
from tandem_broker.queue.leases import BatchLease
from tandem_broker.queue.records import GroupEntry, Journal, State, StoreOptions
from tandem_broker.queue.store import PROGRESS, GroupQueue
from tandem_broker.queue.tenants import Item, Tenant

APPLICATION = 0x54414E44
"""Marks the file as the broker's: "TAND"."""
FORMAT = 4
SCHEMA = (
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
    """CREATE TABLE IF NOT EXISTS entries (place INTEGER PRIMARY KEY, id TEXT NOT NULL, env INTEGER,
    size INTEGER NOT NULL, version INTEGER, received REAL NOT NULL, state TEXT NOT NULL, batch TEXT)""",
    # A table of their own: SQLite writes the whole row again when one of its columns changes.
    "CREATE TABLE IF NOT EXISTS payloads (place INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)
ROWS = """SELECT place, id, env, size, version, received, state, batch, checksum, data
    FROM entries LEFT JOIN payloads USING (place) ORDER BY place"""
PAGE_BYTES = 32 << 10
"""Groups have some hundred KB: with SQLite's own 4 KiB a group takes twice the time."""


class Ledger(Journal):
    """A journal in a folder, and the store that it restores. Made by ``Ledger.open``."""

    def __init__(self, folder: Path, options: StoreOptions) -> None:
        self.folder = folder
        self.path = folder / "ledger.sqlite"
        self.store = GroupQueue(options, journal=self)
        self._lock = _locked(folder)
        self._failure: Exception | None = None
        self._identities: dict[Path, tuple[int, int]] = {}
        try:
            if self.path.exists() and not self.path.is_file():
                raise _damaged(self.path, "it is no file")
            self._sql = sqlite3.connect(self.path)
            os.chmod(self.path, 0o600)
        except BaseException:
            os.close(self._lock)
            raise

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
        try:
            ledger._prepare()
            ledger._restore(now)
            ledger.commit()
        except (sqlite3.DatabaseError, msgspec.ValidationError, ValueError, LookupError, TypeError) as error:
            ledger._close()
            if not isinstance(error, sqlite3.OperationalError):  # a damaged file, or rows that SQLite finds whole
                raise _damaged(ledger.path, f"{type(error).__name__}: {error}") from error
            raise BrokerError(
                f"the ledger in {folder} cannot be opened ({error}); make room on its disk, or mend it, and start again"
            ) from error
        except BaseException:
            ledger._close()
            raise
        return ledger

    def close(self) -> None:
        """Write what was recorded and unlock the folder."""
        self.flush()
        self._close()

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
        if self._failure is None and self._sql.in_transaction:
            try:
                self._sql.commit()
                for path, identity in self._identities.items():
                    if _identity(path) != identity:
                        raise FileNotFoundError(f"{path} was deleted or replaced while the broker ran")
            except (sqlite3.Error, OSError) as error:
                self._failure = error
        if self._failure is not None:
            raise BrokerError(
                f"the ledger in {self.folder} cannot be written ({self._failure}); nothing is accepted any more: "
                "make room on its disk and restart the broker"
            )

    # --- what the store records ---

    def added(self, place: int, entry: GroupEntry, state: State) -> None:
        """Record an accepted entry."""
        row = (place, entry.id, entry.env, entry.size, entry.version, entry.received, state, None)
        self._record("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [row])
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
            BrokerError: it is another program's, another format's or damaged.
        """
        sql = self._sql
        (application,) = sql.execute("PRAGMA application_id").fetchone()
        (tables,) = sql.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (version,) = sql.execute("PRAGMA user_version").fetchone()
        if tables and application != APPLICATION:
            raise _damaged(self.path, "it belongs to another program")
        if tables and version != FORMAT:
            raise BrokerError(
                f"{self.path} has format {version}; this Tandem reads {FORMAT}: use the Tandem that wrote it"
            )
        sql.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        sql.execute("PRAGMA journal_mode = WAL")
        sql.execute("PRAGMA synchronous = FULL")
        if tables and (verdict := sql.execute("PRAGMA quick_check").fetchone()) != ("ok",):
            raise _damaged(self.path, str(verdict[0]))
        sql.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            sql.execute(statement)
        sql.commit()
        self._identities = {path: _identity(path) for path in (self.path, Path(f"{self.path}-wal"))}

    def _restore(self, now: float) -> None:
        """Fill the store. Leases count from ``now``, and so do silences of environments that were not silent already.

        A batch that a trainer which never acknowledges had, and whose answer is not known to have gone out, comes back.
        """
        store = self.store
        facts: dict[str, dict[str, Any]] = {kind: {} for kind in ("env", "lease", "key")}
        for name, value in self._sql.execute("SELECT name, value FROM facts ORDER BY rowid"):
            kind, _, of = name.partition(":")
            facts.setdefault(kind, {})[of] = json.loads(value)
        alone = {kind: values[""] for kind, values in facts.items() if "" in values}
        progress = alone.get("progress", {})
        if "run" in alone:
            store.run = RunParameters(**alone["run"])
            store.tenants.batch_size = store.run.batch_size
        for name in PROGRESS:
            setattr(store, name, progress.get(name, getattr(store, name)))
        store.tenants.names.update(alone.get("names", {}))
        store.seen.update(facts["key"])
        for env_id, fact in sorted((int(env_id), fact) for env_id, fact in facts["env"].items()):
            spec = EnvRegistration(**fact.pop("spec"))
            store.tenants.add(Tenant(env_id=env_id, spec=spec, heard=now, **fact))
        store.tenants.next_id = max(store.tenants.next_id, progress.get("next_id", 0))
        for place, id, env, size, version, received, state, batch, checksum, data in self._sql.execute(ROWS):
            if state not in ("buffered", "queued", "leased") or size < 1:
                raise ValueError(f"a group of {size} sequences is {state}")
            if not isinstance(data, bytes) or zlib.crc32(data) != checksum:
                raise ValueError(f"the payload of group {place} is not what was written")
            entry = GroupEntry(id=id, env=env, size=size, version=version, received=received, payload=data)
            store.waiting.restored(Item(place, entry, store.tenants.of(env), state, batch))
            store.order = max(store.order, place + 1)
        store.counts.update(progress.get("counts", {}))
        store.counts["accepted"] = store.counts["trained"] + store.counts["dropped"] + len(store.waiting.items)
        for fact in facts["lease"].values():
            store.restored(msgspec.convert(fact, BatchLease), now)

    def _close(self) -> None:
        self._sql.close()
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """Lock a folder until the process ends or the returned descriptor is closed.

    Raises:
        BrokerError: another broker has the lock, or there can be none.
    """
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BrokerError(
            f"{folder / 'lock'} cannot be opened: {error.strerror}; name another folder with --data"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BrokerError(f"another broker uses {folder}; give this one another folder, or end that one") from None
    return handle


def _damaged(path: Path, why: str) -> BrokerError:
    """The error for a ledger that cannot be used."""
    return BrokerError(
        f"{path} is damaged or no broker's ledger ({' '.join(why.split())}); name another folder with --data"
    )


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode of a path; zeros if there is nothing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return status.st_dev, status.st_ino


@contextmanager
def opened(folder: Path | None, options: StoreOptions, now: float) -> Iterator[GroupQueue]:
    """A store: kept in a folder, or without one in memory alone.

    Raises:
        BrokerError: another broker uses the folder, or its ledger cannot be read.
    """
    if folder is None:
        yield GroupQueue(options)
        return
    ledger = Ledger.open(folder, options, now)
    try:
        yield ledger.store
    finally:
        ledger.close()
