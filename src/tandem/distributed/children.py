"""Ranks as child processes of the lead, on its host: each side sees by the other's process that it is lost.

That holds before they have connected too, while a follower's interpreter may stand still for its imports.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.distributed.placement import Placement
from tandem.processes import alive_after, identity

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
        """Wait until one has ended; says which, and what it wrote last."""
        while True:
            for rank, process in self._processes.items():
                if (code := process.poll()) is not None:
                    tail = self.log(rank).read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
                    return (
                        f"rank {rank} (pid {process.pid} on this host) was lost before it had connected: it ended with "
                        f"{code}; {self.log(rank)} ends with:\n{tail}"
                    )
            await asyncio.sleep(POLL_SECONDS)

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


async def lead_lost(environ: Mapping[str, str]) -> str:
    """Wait until the lead that started this process is gone; for ever without such a lead."""
    pid, _, started = environ.get(LEAD, "").partition(" ")
    if not pid:
        await asyncio.get_running_loop().create_future()
    while alive_after(int(pid), started):
        await asyncio.sleep(POLL_SECONDS)
    return f"its process {pid} is gone"
