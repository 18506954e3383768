"""Ranks as child processes of the lead, on its host."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from tandem.distributed.placement import Placement

POLL_SECONDS = 0.1
"""Between two looks at the children."""
END_SECONDS = 10.0
"""How long a child may take to end in order."""
KILL_SECONDS = 2.0
"""How long the others may take to end by themselves once one is lost."""
TAIL_CHARACTERS = 2000
"""Of the last output of one that ended."""


class Children:
    """Followers that were started here; each writes to a file of its own."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: Sequence[str], world: int, host: str, port: int) -> None:
        """Start ranks 1 to ``world`` - 1 by the same command line, each with its place in the environment."""
        self._logs.mkdir(parents=True, exist_ok=True)
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
                    env={**os.environ, **place.environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    # Ctrl-C is for the lead, which ends the others in order.
                    start_new_session=True,
                )

    def log(self, rank: int) -> Path:
        """Where a rank writes."""
        return self._logs / f"rank-{rank}.log"

    async def first_ended(self) -> str:
        """Wait until one has ended; says which, and what it wrote last."""
        while True:
            for rank, process in self._processes.items():
                if (code := process.poll()) is not None:
                    tail = self.log(rank).read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
                    return f"rank {rank} ended with {code} before it had connected; {self.log(rank)} ends with:\n{tail}"
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
