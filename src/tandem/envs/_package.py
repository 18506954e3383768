"""Packages of others, played by themselves in the interpreter that has them: a process that is watched and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tandem import processes
from tandem.errors import EnvError
from tandem.observability import waits
from tandem.types import Json

log = logging.getLogger(__name__)

_RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs the worker with the working directory, where the environment may be, first among what is imported from."""
_CANCEL_SECONDS = 5.0
"""A process that does not end an episode for so long hangs, and is killed."""
MOST_BYTES = 64 << 20
"""Largest answer of a process."""


class Package:
    """A package in the interpreter that has it; its process is started where there is none or it has ended."""

    def __init__(self, python: str, reader: str, name: str, **options: Json) -> None:
        """``reader`` names the file here that plays the package, and is given the options."""
        self._start: Callable[[], _Process] = lambda: _Process(python or sys.executable, reader, name, options)
        self._process: _Process | None = None

    @property
    def process(self) -> _Process:
        """The process that runs now."""
        if self._process is None or self._process.ended:
            self._process = self._start()
        return self._process

    def read(self, method: str, **options: Json) -> Json:
        """Ask for something before anything is played; raises EnvError if that fails."""
        return self.process.ask(method, **options)[1].result()

    def tell(self, method: str, **options: Json) -> None:
        """Say something that nobody waits for; nothing is said to a process that has ended."""
        if self._process is not None and not self._process.ended:
            self._process.ask(method, **options)

    async def answer(self, seconds: float, owner: str, method: str, **options: Json) -> Json:
        """Ask for something and await it; raises EnvError if that fails or takes too long."""
        process = self.process
        number, future = process.ask(method, **options)
        try:
            async with asyncio.timeout(seconds):
                return await waits.wait(asyncio.wrap_future(future), owner=owner, reason=method, on=process.name)
        except TimeoutError:
            raise EnvError(f"{process.name} took longer than {seconds:g} s to {method} (timeout_seconds)") from None
        finally:
            if future.cancelled():
                await process.cancel(number)


class _Process:
    """Handle of the environment's process, which ends with this one, or when nothing holds the handle."""

    def __init__(self, python: str, reader: str, name: str, options: Mapping[str, Json]) -> None:
        """Start it; raises EnvError if there is no such interpreter."""
        if (interpreter := shutil.which(python)) is None:
            raise EnvError(f"python {python!r}: there is no such interpreter; name one that has {reader}")
        worker, file = (Path(__file__).with_name(f"_{name}.py") for name in ("package_worker", f"{reader}_reader"))
        self._process = subprocess.Popen(
            [interpreter, "-c", _RUN, str(worker), str(file), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # it is killed with all that it started
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            | {
                "PATH": f"{Path(interpreter).parent}:{os.environ.get('PATH', '')}",  # its programs first
                "PYTHONPATH": os.pathsep.join(filter(_has_modules_of_the_user, sys.path)),
            },
        )
        self.name = f"environment {name} (pid {self._process.pid})"
        self._numbers = count()
        self._requests = _Requests(self.name)
        for work in (_listen, _answer):
            threading.Thread(target=work, args=(self._process, self._requests), daemon=True).start()
        self.kill = weakref.finalize(self, _kill, self._process)

    @property
    def ended(self) -> bool:
        """True once the process is gone, or was killed."""
        return not self.kill.alive or self._requests.ended

    def ask(self, method: str, **options: Json) -> tuple[int, Future[Json]]:
        """Ask for something: the request's number, and the answer or EnvError when it comes."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        future = self._requests.begin(number)
        with self._requests.lock, contextlib.suppress(OSError, ValueError):  # it has ended, which the future is told
            self._process.stdin.write(json.dumps({"number": number, "method": method, **options}).encode() + b"\n")
            self._process.stdin.flush()
        return number, future

    async def cancel(self, number: int) -> None:
        """End what was asked for; a process that is too busy to hear of it is killed."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self.ask("cancel", request=number)[1]), _CANCEL_SECONDS)
        except TimeoutError:
            log.warning("%s hangs: it does not end an episode, and is killed", self.name)
            self.kill()
        except EnvError as error:
            log.info("%s", error)  # it has ended itself


@dataclass(slots=True)
class _Requests:
    """What a process was answer for and has not answered, and the last lines that it printed."""

    name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    _futures: dict[int, Future[Json]] = field(default_factory=dict)
    _end: str = ""

    def begin(self, number: int) -> Future[Json]:
        """Note a request; where the process has ended, it has failed."""
        future = Future[Json]()
        with self.lock:
            if not self._end:
                self._futures[number] = future
                return future
        future.set_exception(EnvError(self._end))
        return future

    def answer(self, number: int, value: Json = None, error: str = "") -> None:
        """Give an answer to who waits for it, if anyone still does."""
        future = self._futures.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error:
            future.set_exception(EnvError(f"{self.name}: {error}"))
        else:
            future.set_result(value)

    @property
    def ended(self) -> bool:
        """True once nothing more is answered."""
        return bool(self._end)

    def close(self, status: int) -> None:
        """The process has ended, and with it all that it was asked for."""
        with self.lock:
            self._end = f"ended with status {status}; it said last: {' | '.join(self.lines) or 'nothing'}"
        for number in list(self._futures):
            self.answer(number, error=self._end)


def _has_modules_of_the_user(folder: str) -> bool:
    """False for what belongs to this interpreter alone."""
    return os.path.isdir(folder) and "-packages" not in folder and not folder.startswith(sysconfig.get_path("stdlib"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it started, such as servers of tools in sessions of their own."""
    if (leader := processes.identity(process.pid)) is not None:
        processes.kill(processes.family(leader))
    processes.kill_group(process.pid)


def _listen(process: subprocess.Popen[bytes], requests: _Requests) -> None:
    """Keep the last of what it prints, however much that is."""
    assert process.stderr is not None
    with process.stderr:
        while line := process.stderr.readline(1 << 16):
            requests.lines.append(text := line.decode(errors="replace").rstrip())
            log.debug("%s: %s", requests.name, text)


def _answer(process: subprocess.Popen[bytes], requests: _Requests) -> None:
    """Pass answers on until the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        while line := process.stdout.readline(MOST_BYTES):
            if len(line) == MOST_BYTES:
                requests.lines.append(f"an answer of more than {MOST_BYTES >> 20} MiB, so it was killed")
                break
            requests.answer(**json.loads(line))
    _kill(process)  # what it started, and itself where it still runs
    requests.close(process.wait())
    with requests.lock, contextlib.suppress(BrokenPipeError):
        process.stdin.close()
