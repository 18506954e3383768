"""Identity of processes by pid and start time, from Linux' ``/proc``: never by name, never by a reused pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_POLL_SECONDS = 0.1
"""Between two looks at processes that are ending."""


class Identity(NamedTuple):
    """Unique identity of a process, even where its pid is reused."""

    pid: int
    """Its number."""
    started: str
    """When it started: clock ticks since boot, and which boot."""


@dataclass(frozen=True, slots=True)
class _Stat:
    """What ``/proc/<pid>/stat`` says."""

    me: Identity
    living: bool
    parent: int
    group: int
    session: int


def identity(pid: int) -> Identity | None:
    """Identity of the process that has this pid now, a zombie included; None if there is none."""
    stat = _stat(pid)
    return None if stat is None else stat.me


def alive_after(pid: int, started: str) -> bool:
    """True if the process that had this pid and start time still runs; another one with its pid does not count."""
    stat = _stat(pid)
    return stat is not None and stat.living and stat.me.started == started


def family(leader: Identity, known: Iterable[Identity] = ()) -> set[Identity]:
    """The living among ``known``, the leader's session and its group, and the descendants of all these."""
    all_pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    table = {stat.me.pid: stat for pid in all_pids if (stat := _stat(pid)) is not None and stat.living}
    pids = {process.pid for process in known if process.pid in table and table[process.pid].me == process}
    # A pid is not given anew while a session or group bears it: another process there means that both are gone.
    if identity(leader.pid) in (leader, None):
        pids |= {pid for pid, stat in table.items() if leader.pid in (pid, stat.session, stat.group)}
    while more := {pid for pid, stat in table.items() if stat.parent in pids} - pids:
        pids |= more
    return {table[pid].me for pid in pids}


async def gone(processes: Iterable[Identity], seconds: float) -> set[Identity]:
    """Wait until all have ended; returns those that have not after ``seconds``."""
    deadline = time.monotonic() + seconds
    left = set(processes)
    while (left := {process for process in left if alive_after(*process)}) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    return left


def kill(processes: Iterable[Identity]) -> None:
    """SIGKILL to those that still run."""
    for process in processes:
        if alive_after(*process):
            with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
                os.kill(process.pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """SIGKILL to the group that a process leads, if one of it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _stat(pid: int) -> _Stat | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()  # the program's name, in brackets, may hold spaces and brackets
    state, (parent, group, session) = fields[0], map(int, fields[1:4])
    me = Identity(pid, f"{fields[19]} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}")
    # A zombie's memory is gone; only its parent's wait is missing.
    return _Stat(me, state not in "ZX", parent, group, session)
