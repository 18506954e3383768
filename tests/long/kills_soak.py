"""A whole system in bad weather: whatever can go wrong goes wrong at random, for as long as one likes, on one core.

Beside kills: stops, a proxy that delays or resets the connections to broker and engine, a grader that hangs or dies,
and a disk that is full for a while (a small tmpfs for run and ledger, where one may be mounted).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kills import Killer, TrialResult, run_once
from kills_systems import Apart, System, choose
from processes import Child

from tandem.ports import free_port

DISK_BYTES = 48 << 20
"""Of the file system of a run and its ledger."""
STEPS = 150
"""Of each run."""
SLOW_SECONDS = 0.2
"""By which a slow connection delays what it carries."""
SPELL_SECONDS = 3.0
"""How long connections are slow, or the disk is full."""
REWARD_FAILED = 4
"""Exit code of who cannot grade."""


# --- the proxy ---


@dataclass
class Proxy:
    """Connections pass through; SIGUSR1 resets all of them, SIGUSR2 makes them slow for a while."""

    routes: Sequence[tuple[int, int]]
    """Ports to listen at, each with the one to go on to."""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _slow_until: float = 0.0

    def run(self) -> None:
        """Until the end of the process."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._reset)
        loop.add_signal_handler(signal.SIGUSR2, self._slow)
        for near, far in self.routes:
            await asyncio.start_server(partial(self._carry, far), "127.0.0.1", near)
        await asyncio.Event().wait()

    def _reset(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def _slow(self) -> None:
        self._slow_until = time.monotonic() + SPELL_SECONDS

    async def _carry(self, far: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", far)
        except OSError:
            writer.transport.abort()  # as if nobody listened
            return
        ends = {writer, onward}
        self._open |= ends
        try:
            await asyncio.gather(self._pump(reader, onward), self._pump(there, writer))
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if time.monotonic() < self._slow_until:
                    await asyncio.sleep(SLOW_SECONDS)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


# --- the disk ---


def mount(folder: Path) -> bool:
    """A file system of its own for a folder; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={DISK_BYTES}".encode()) == 0)


def unmount(folder: Path) -> None:
    """Undo it; what is in the folder is gone."""
    ctypes.CDLL(None).umount2(str(folder).encode(), 2)


# --- the system ---


@dataclass
class Exposed(Apart):
    """Every connection to broker and engine goes through the proxy."""

    near: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.near = free_port(), free_port()
        super().__post_init__()
        self.children = {"proxy": Child("proxy", self.place, self._proxy, self.environment), **self.children}

    def _proxy(self) -> list[str]:
        return [__file__, json.dumps(list(zip(self.near, self.ports, strict=True)))]

    def broker_url(self) -> str:
        return f"http://127.0.0.1:{self.near[0]}"

    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.near[1]}"

    def start(self) -> None:
        self.children["proxy"].start()
        super().start()

    def victims(self) -> dict[str, Any]:
        """The proxy is the weather."""
        return {name: child for name, child in super().victims().items() if name != "proxy"}

    def finish(self) -> None:
        for child in self.children.values():  # no weather tends them any more
            if child.alive:
                os.kill(child.pid, signal.SIGCONT)
        super().finish()
        self.children["proxy"].kill()


@dataclass
class Weather(Killer):
    """What befalls a system until its time is up."""

    until: float = 0.0
    """When it clears up, by the monotonic clock."""
    disks: Mapping[str, Path] = field(default_factory=dict)
    """What can be full: the run's folder, by the trainer's name, and the ledger's, by the broker's."""
    full: dict[str, float] = field(default_factory=dict)
    """Disks that are full, and since when."""
    thaws: dict[int, float] = field(default_factory=dict)
    """Stopped processes, and when each goes on."""

    @property
    def more(self) -> bool:
        return time.monotonic() < self.until

    def tend(self, system: System) -> None:
        """What was stopped goes on; disks get room again, and who gave up meanwhile is started again."""
        now = time.monotonic()
        for pid, when in list(self.thaws.items()):
            if now >= when:
                del self.thaws[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        for name, child in system.children.items():
            if not child.alive and child.code == REWARD_FAILED:
                system.restart(name)  # the fault befell the gold reply that is looked at before anything is played
        if "trainer" in self.full and not system.trainer.alive:
            # Not before: it goes on with its last checkpoint, and what it could not write down is not of its history.
            self._room("trainer")
            system.restart("trainer")
        if now - self.full.get("broker", now) > SPELL_SECONDS:
            self._room("broker")
            broker = system.children["broker"]
            if broker.alive:  # it takes nothing more until it is started again, and says so
                broker.kill()
            broker.start()

    def excuses(self, system: System, name: str) -> bool:
        """Who has no room may end, and who finds out at the start that graders fail."""
        return name in self.full or system.children[name].code == REWARD_FAILED

    def _room(self, whose: str) -> None:
        (self.disks[whose] / "filler").unlink(missing_ok=True)
        del self.full[whose]

    def strike(self, system: System) -> None:
        """One fault, of any kind."""
        kinds = [self._killed, self._killed, self._stop, self._reset, self._slow, self._grader]
        if self.disks and not self.full:
            kinds.append(self._fill)
        if fault := self.chance.choice(kinds)(system):
            self.done[fault] += 1

    def _killed(self, system: System) -> str:
        super().strike(system)  # which counts by itself
        return ""

    def _stop(self, system: System) -> str:
        victims = system.victims()
        if victims:
            victim = victims[choose(self.chance, victims)]
            os.kill(victim.pid, signal.SIGSTOP)
            self.thaws[victim.pid] = time.monotonic() + self.chance.uniform(0.2, 6.0)
        return "stop"

    def _reset(self, system: System) -> str:
        os.kill(system.children["proxy"].pid, signal.SIGUSR1)
        return "reset"

    def _slow(self, system: System) -> str:
        os.kill(system.children["proxy"].pid, signal.SIGUSR2)
        return "slow"

    def _grader(self, system: System) -> str:
        how = self.chance.choice(["hang", "crash"])
        (system.place / "fault").write_text(how)
        return f"grader {how}"

    def _fill(self, system: System) -> str:
        whose = self.chance.choice(sorted(self.disks))
        with contextlib.suppress(OSError), (self.disks[whose] / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        self.full[whose] = time.monotonic()
        return f"full disk {whose}"


def soaked(folder: Path, model: Path, seconds: float, seed: int) -> TrialResult:
    """Run after run until the time is up; the last one ends by itself in peace."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[seed % len(cores)]})
    result, chance = TrialResult("soak"), random.Random(f"soak {seed}")
    begun = time.monotonic()
    weather = Weather(chance, 0, 4.0, until=begun + seconds)
    while weather.more and result.fine:
        result.runs += 1
        place = folder / f"run-{result.runs}"
        disks = {"trainer": place / "runs", "broker": place / "ledger"}
        weather.disks = disks if all(map(mount, disks.values())) else {}
        if not weather.disks and result.runs == 1:
            print("no file system may be mounted here, so no disk is ever full", file=sys.stderr)
        try:
            system = Exposed(place, lag=chance.choice([1, 2, 4]), steps=STEPS, model=model, lease_seconds=8.0)
            run_once(system, weather, result)
        finally:
            for disk in disks.values():
                unmount(disk)
    result.kills, result.seconds = weather.done, time.monotonic() - begun
    return result


if __name__ == "__main__":
    Proxy(json.loads(sys.argv[1])).run()
