"""Lock of a run's folder: one trainer at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from pathlib import Path

from tandem.errors import ConfigError, TandemError, command

log = logging.getLogger(__name__)

_descriptors: set[int] = set()
"""Descriptors of this process's locks. A forked child inherits them, and must not keep a dead trainer's lock."""


def _close_inherited() -> None:
    """In a forked child: a lock is over when every copy of its descriptor is closed."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_inherited)


def lock_file(folder: Path) -> Path:
    """Lock file of a run folder; it holds the pid of its present or last owner."""
    return folder / "run.lock"


class RunLock:
    """An exclusive lock on a run's folder. The kernel ends it with its process, however that ends."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._handle: int | None = None

    @property
    def folder(self) -> Path:
        """The folder that is locked; only while there is one."""
        assert self._folder is not None
        return self._folder

    def take(self, folder: Path) -> None:
        """Lock a folder, which must be there; nothing where this lock has it already.

        Raises:
            ConfigError: another process has it; names its pid.
        """
        if self._handle is not None:
            return
        try:
            handle = os.open(lock_file(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"the run's folder {folder} cannot be locked: {error}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(handle, 200).decode(errors="replace").strip() or "a process that did not say its pid"
            os.close(handle)
            seen = f"see what it does with: {command('why', folder)}"
            raise ConfigError(f"{other} is at work in {folder}; {seen}, or start a run with another name=") from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): see to it yourself that no other trainer uses it", folder, error)
        _descriptors.add(handle)
        os.ftruncate(handle, 0)
        os.write(handle, f"pid {os.getpid()} on {platform.node()}\n".encode())
        self._folder, self._handle = folder, handle

    def check(self) -> None:
        """Look whether the folder that was locked is still there.

        Raises:
            TandemError: it was deleted or moved.
        """
        assert self._handle is not None
        try:
            there = os.path.samestat(os.stat(lock_file(self.folder)), os.fstat(self._handle))
        except (FileNotFoundError, NotADirectoryError):
            there = False
        if not there:
            again = f"put it back and go on with: {command('train', self.folder)}, or start anew from the recipe"
            raise TandemError(f"the run's folder {self.folder} was deleted or moved, so nothing can be saved; {again}")

    def close(self) -> None:
        """Let the folder go."""
        if self._handle is not None:
            _descriptors.discard(self._handle)
            os.close(self._handle)
            self._folder = self._handle = None
