"""Heartbeat: a file in the run's folder, rewritten every second with all open waits, and stacks on a signal.

Each rank has its own, and ``tandem why`` reads them. A thread writes it, so that a blocked event loop shows from
outside. If native code holds the interpreter, the file grows old, and a signal still writes the stacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from tandem.observability import trace, waits
from tandem.processes import Identity, alive_after, identity
from tandem.types import Json

PERIOD = 1.0
"""Seconds between heartbeats."""
SIGNAL = signal.SIGUSR1
"""Makes the process write its threads' stacks, even in native code."""
STALE = 10.0
"""Age of a heartbeat in seconds from which on its process is considered hung."""
FRAMES = 12
"""Innermost frames of a task that are written."""


def file(folder: Path, rank: int = 0) -> Path:
    """Path of the heartbeat file of a rank."""
    return folder / f"vitals{_suffix(rank)}.json"


def stacks(folder: Path, rank: int = 0) -> Path:
    """Path of the file of a rank's stacks."""
    return folder / "logs" / f"stacks{_suffix(rank)}.txt"


def request(folder: Path, rank: int = 0) -> Path:
    """Path of a file that asks a rank for stacks; the rank removes it when they are written."""
    return folder / f"stacks{_suffix(rank)}.request"


def _suffix(rank: int) -> str:
    return f"-rank-{rank}" if rank else ""


def followers(folder: Path) -> list[int]:
    """Ranks other than 0 that have a heartbeat."""
    numbers = (path.stem.removeprefix("vitals-rank-") for path in folder.glob("vitals-rank-*.json"))
    return sorted(int(number) for number in numbers if number.isdigit())


def read(folder: Path, rank: int = 0) -> dict[str, Json] | None:
    """The last heartbeat of a rank; None if there is none."""
    try:
        signs = json.loads(file(folder, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return signs if isinstance(signs, dict) else None


def is_here(signs: Mapping[str, Json]) -> bool:
    """True if a heartbeat is of this host."""
    host: str | None = signs.get("host")
    return host in (None, socket.gethostname())


def process(folder: Path) -> Literal["", "alive", "gone"]:
    """State of the process of the last heartbeat; empty where there is none, or an old one of another host."""
    if (signs := read(folder)) is None:
        return ""
    if not is_here(signs):
        return "alive" if time.time() - signs["at"] <= STALE else ""
    return "alive" if alive_after(signs["pid"], signs["started"]) else "gone"


@contextmanager
def shown(folder: Path, rank: int = 0) -> Iterator[None]:
    """Write heartbeats while the block lasts, within an event loop.

    Args:
        folder: the run's; it has a logs folder.
        rank: of this process. Rank 0 removes what other ranks of an earlier start left.
    """
    request(folder, rank).unlink(missing_ok=True)
    for earlier in followers(folder) if rank == 0 else ():
        file(folder, earlier).unlink(missing_ok=True)
    over = threading.Event()
    beat = Beat(asyncio.get_running_loop(), PERIOD / 2)
    with stacks(folder, rank).open("a", encoding="utf-8") as out:
        faulthandler.register(SIGNAL, out, all_threads=True)
        thread = threading.Thread(target=_write, args=(folder, rank, beat, out, over), name="vitals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            beat.stop()
            faulthandler.unregister(SIGNAL)
            file(folder, rank).unlink(missing_ok=True)


class Beat:
    """Time of an event loop's last turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, period: float) -> None:
        self.loop, self._period = loop, period
        self._turn()

    def _turn(self) -> None:
        self.last = time.monotonic()
        self._timer = self.loop.call_later(self._period, self._turn)

    def stop(self) -> None:
        """Take no more turns."""
        self._timer.cancel()


def _write(folder: Path, rank: int, beat: Beat, out: TextIO, over: threading.Event) -> None:
    """The thread: a heartbeat each period, stacks on request."""
    process = identity(os.getpid())
    assert process is not None
    while True:
        with contextlib.suppress(OSError):  # a full disk ends no run; the age of the file tells
            aside = file(folder, rank).with_suffix(".tmp")
            aside.write_text(json.dumps(_signs(process, time.monotonic() - beat.last)), encoding="utf-8")
            aside.replace(file(folder, rank))
            if request(folder, rank).exists():
                write_stacks(out, beat.loop)
                request(folder, rank).unlink(missing_ok=True)
        if over.wait(PERIOD):
            return


def _signs(process: Identity, lag: float) -> dict[str, Json]:
    """Contents of a heartbeat."""
    return {
        "pid": process.pid,
        "started": process.started,
        "host": socket.gethostname(),
        "at": time.time(),
        "loop": round(lag, 3),
        "waits": [dataclasses.asdict(wait.snapshot()) for wait in waits.current()],
        "doing": [[name, round(seconds, 3)] for name, seconds in trace.current()],
    }


def write_stacks(out: TextIO, loop: asyncio.AbstractEventLoop) -> None:
    """Write the stack of every thread and of every task of the event loop."""
    out.write(f"\n== stacks of process {os.getpid()}, {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            out.write(f"-- thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame, FRAMES))}")
    for task in sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name):
        out.write(f"-- task {task.get_name()}\n{''.join(_awaiting(task.get_coro()))}")
    out.flush()


def _awaiting(coroutine: object) -> list[str]:
    """Where a suspended coroutine stands, and the ones that it awaits; asyncio itself tells only the outermost."""
    lines: list[str] = []
    while coroutine is not None and len(lines) < FRAMES:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}\n')
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return lines or ["  (running, or not begun)\n"]
