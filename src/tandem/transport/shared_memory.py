"""Files that are memory: made by whoever lends, found and mapped by whoever attaches."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import TransportError

SHARED_MEMORY = Path("/dev/shm")
"""Where files are memory."""
HEADER = 64
"""Bytes before the first tensor: the magic and the token of this lending."""
ASK_AGAIN = "the lender has ended or was restarted: ask the running one for a new description"
"""What to do about a stale description."""

_MAGIC = b"tandem lent tensors\n"


def create(path: Path, size: int, token: str) -> int:
    """A new file, with all its memory reserved and its lock held; the lock is how others see that we live.

    Raises:
        TransportError: there is such a file already, no such folder, or too little memory.
    """
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TransportError(
                f"{path} cannot be made ({error.strerror}); give a path in a folder that exists, at which there is no "
                "file yet: remove_orphans removes what dead lenders left"
            ) from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:  # else it was taken for an orphan before it was locked
            break
        os.close(lock)
    try:
        os.pwrite(lock, _header(token), 0)
        # A file with holes would be made at once, and the process killed at the first write that finds no memory.
        os.posix_fallocate(lock, 0, size)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        release(path, lock, os.getpid())
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise
        raise TransportError(
            f"{path.parent} has {free / 2**20:.0f} MiB free, but {size / 2**20:.0f} MiB are to be lent; make it larger "
            "(docker run --shm-size, or mount -o remount,size=)"
        ) from error
    return lock


def _header(token: str) -> bytes:
    return (_MAGIC + token.encode()).ljust(HEADER, b"\0")


def release(path: Path, lock: int, owner: int) -> None:
    """Take the file's name away, and the lock with it."""
    if os.getpid() != owner:  # a forked child that exits must not take its parent's file away
        return
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), os.fstat(lock)):  # else the name is another's by now
            path.unlink()
    os.close(lock)


def open_file(description: Mapping[str, Any]) -> mmap.mmap:
    """Map the file of a description; the mapping stays when the file's name goes.

    Raises:
        TransportError: the file is gone or is another.
    """
    path, size = Path(description["path"]), int(description["size"])
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"{path} cannot be opened ({error.strerror}); {ASK_AGAIN}") from error
    try:
        if os.fstat(handle).st_size != size or os.pread(handle, HEADER, 0) != _header(description["token"]):
            raise TransportError(f"{path} is not the file that was described; {ASK_AGAIN}")
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)


def remove_orphans(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's shared files whose lender ended without closing them; returns their paths."""
    removed = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.pread(handle, len(_MAGIC), 0) == _MAGIC:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the lender lives
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(handle)
    return removed
