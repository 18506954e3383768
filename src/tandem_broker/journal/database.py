"""The ledger's SQLite file: who owns it, whether it is whole, and the transactions written to it."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import BrokerError

APPLICATION = 0x54414E44
"""Marks the file as the broker's: "TAND"."""
FORMAT = 3
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS entries (place INTEGER PRIMARY KEY, id TEXT NOT NULL, env INTEGER,
    size INTEGER NOT NULL, version INTEGER, received REAL NOT NULL, state TEXT NOT NULL, batch TEXT,
    num_bytes INTEGER NOT NULL)""",
    # A table of their own: SQLite writes the whole row again when one of its columns changes.
    "CREATE TABLE IF NOT EXISTS payloads (place INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, at REAL NOT NULL)",
)
CHECKED = ("entries", "facts", "keys")
"""Tables that are checked at the start; a payload is checked when it is read."""
PAGE_BYTES = 32 << 10
"""Groups have some hundred KB: with SQLite's own 4 KiB a group takes twice the time."""


def locked(folder: Path) -> int:
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


def damaged(path: Path, why: str) -> BrokerError:
    """The error for a ledger that cannot be used."""
    return BrokerError(
        f"{path} is damaged or no broker's ledger ({' '.join(why.split())}); name another folder with --data"
    )


class Database:
    """``ledger.sqlite`` in WAL mode, every commit flushed. One thread writes; any thread may read payloads."""

    def __init__(self, path: Path) -> None:
        """Raises BrokerError if there can be no such file."""
        if path.exists() and not path.is_file():
            raise damaged(path, "it is no file")
        self.path = path
        self.sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        os.chmod(path, 0o600)
        self._reader: sqlite3.Connection | None = None
        self._reading = threading.Lock()
        self._identities: dict[Path, tuple[int, int]] = {}

    def prepare(self) -> None:
        """Check whose file it is and that it is whole, then make it ready.

        Raises:
            BrokerError: it is another program's, another format's or damaged.
        """
        (application,) = self.sql.execute("PRAGMA application_id").fetchone()
        (tables,) = self.sql.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (version,) = self.sql.execute("PRAGMA user_version").fetchone()
        if tables and application != APPLICATION:
            raise damaged(self.path, "it belongs to another program")
        if tables and version != FORMAT:
            raise BrokerError(
                f"{self.path} has format {version}; this Tandem reads {FORMAT}: use the Tandem that wrote it"
            )
        self.sql.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self.sql.execute("PRAGMA journal_mode = WAL")
        self.sql.execute("PRAGMA synchronous = FULL")
        for table in CHECKED if tables else ():
            if (verdict := self.sql.execute(f"PRAGMA quick_check({table})").fetchone()) != ("ok",):
                raise damaged(self.path, str(verdict[0]))
        with self.transaction() as sql:
            for statement in (f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {FORMAT}", *SCHEMA):
                sql.execute(statement)
        self._reader = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._identities = {path: _identity(path) for path in (self.path, Path(f"{self.path}-wal"))}

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all of a block, or nothing.

        Raises:
            FileNotFoundError: the files were deleted or replaced, so that further writes would be lost.
        """
        self.sql.execute("BEGIN IMMEDIATE")
        with self.sql:
            yield self.sql
        for path, identity in self._identities.items():
            if _identity(path) != identity:
                raise FileNotFoundError(f"{path} was deleted or replaced while the broker ran")

    def payload(self, place: int) -> bytes:
        """Read a payload.

        Raises:
            BrokerError: it was dropped meanwhile, or is not what was written.
        """
        assert self._reader is not None
        try:
            with self._reading:
                row = self._reader.execute("SELECT checksum, data FROM payloads WHERE place = ?", (place,)).fetchone()
        except sqlite3.DatabaseError as error:
            raise BrokerError(f"{self.path} cannot be read: {error}") from error
        if row is None:
            raise BrokerError(f"group {place} was dropped from {self.path} while its batch was read; ask again")
        checksum, data = row
        if not isinstance(data, bytes) or zlib.crc32(data) != checksum:
            raise BrokerError(
                f"{self.path} is damaged in the payload of group {place}: put the file back as it was, or give up "
                "what is queued (another folder, or GET /reset_data)"
            )
        return data

    def close(self) -> None:
        """Close the file."""
        for connection in (self.sql, self._reader):
            if connection is not None:
                connection.close()


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode of a path; zeros if there is nothing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return status.st_dev, status.st_ino
