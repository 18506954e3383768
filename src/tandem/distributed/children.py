"""Ranks as child processes of the lead, on its host: each side sees by the other's process that it is lost.

That holds before they have connected too, while a follower's interpreter may stand still for its imports.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.distributed.channel import SILENT_SECONDS
from tandem.distributed.placement import Placement
from tandem.processes import Identity, age, alive_after, identity, is_stopped

POLL_SECONDS = 0.1
"""Between two looks at the children."""
END_SECONDS = 10.0
"""How long a child may take to end in order."""
KILL_SECONDS = 2.0
"""How long the others may take to end by themselves once one is lost."""
TAIL_CHARACTERS = 2000
"""Of the last output of one that ended."""
LEAD = "TANDEM_LEAD"
"""Variable in which a child has its lead: the process's number and when it started."""


class Children:
    """Followers that were started here; each writes to a file of its own."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: Sequence[str], world: int, host: str, port: int) -> None:
        """Start ranks 1 to ``world`` - 1 by the same command line, each with its place in the environment."""
        self._logs.mkdir(parents=True, exist_ok=True)
        lead = identity(os.getpid())
        assert lead is not None
        for rank in range(1, world):
            place = Placement(
                rank=rank,
                world_size=world,
                local_rank=rank,
                local_world_size=world,
                master_addr=host,
                master_port=port,
                launcher="tandem",
            )
            with self.log(rank).open("ab") as out:
                self._processes[rank] = subprocess.Popen(
                    command,
                    env={**os.environ, **place.environment(), LEAD: f"{lead.pid} {lead.started}"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    # Ctrl-C is for the lead, which ends the others in order.
                    start_new_session=True,
                )

    def log(self, rank: int) -> Path:
        """Where a rank writes."""
        return self._logs / f"rank-{rank}.log"

    async def first_lost(self) -> str:
        """Wait until one has ended, or is stopped and stays so; says which, and what it wrote last."""
        pauses: dict[int, ProcessPause] = {}
        while True:
            for rank, process in self._processes.items():
                if (code := process.poll()) is not None:
                    return self._lost(rank, f"it ended with {code}")
                if (pause := pauses.get(rank)) is None:
                    if (child := identity(process.pid)) is not None:
                        pauses[rank] = ProcessPause(child)
                elif pause.lasts():
                    return self._lost(rank, f"it has been stopped, as by SIGSTOP, for {SILENT_SECONDS:g} s")
            await asyncio.sleep(POLL_SECONDS)

    def _lost(self, rank: int, why: str) -> str:
        tail = self.log(rank).read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
        who = f"rank {rank} (pid {self._processes[rank].pid} on this host)"
        return f"{who} was lost before it had connected: {why}; {self.log(rank)} ends with:\n{tail}"

    def kill_soon(self) -> None:
        """Kill them in a moment, from a thread: this process may be in a collective with one that stands still."""
        timer = threading.Timer(KILL_SECONDS, self._kill)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    async def close(self, *, at_once: bool) -> None:
        """Wait for those that are ending in order, and kill what is left."""
        left = (2.0 if at_once else END_SECONDS) / POLL_SECONDS
        while left > 0 and any(process.poll() is None for process in self._processes.values()):
            await asyncio.sleep(POLL_SECONDS)
            left -= 1
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(END_SECONDS)


class ProcessPause:
    """Whether a process of this host is stopped, and stays so.

    Args:
        process: that is looked at.
        unseen: seconds before the first look; one that is stopped then may have been so for as long, and is taken to.
    """

    def __init__(self, process: Identity, *, unseen: float = 0.0):
        self._process = process
        self._unseen = unseen
        self._since: float | None = None

    def lasts(self) -> bool:
        """True once every look in ``SILENT_SECONDS`` has found it stopped."""
        unseen, self._unseen = self._unseen, 0.0
        if not is_stopped(*self._process):
            self._since = None
            return False
        now = time.monotonic()
        self._since = now - unseen if self._since is None else self._since
        return now - self._since >= SILENT_SECONDS


async def lead_lost(environ: Mapping[str, str]) -> str:
    """Wait until the lead that started this process is gone, or is stopped and stays so; for ever without such a lead.

    Returns:
        What became of it.
    """
    pid, _, started = environ.get(LEAD, "").partition(" ")
    if not pid:
        await asyncio.get_running_loop().create_future()
    lead = Identity(int(pid), started)
    # It ran when it started this process, whose imports take as long as others may take to end.
    pause = ProcessPause(lead, unseen=age())
    while alive_after(*lead):
        if pause.lasts():
            return f"its process {pid} has been stopped, as by SIGSTOP, for {SILENT_SECONDS:g} s"
        await asyncio.sleep(POLL_SECONDS)
    return f"its process {pid} is gone"
