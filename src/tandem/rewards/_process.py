"""One grading process, seen from the run: start it, hand it calls, await each answer up to a deadline, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tandem import waits
from tandem.errors import RewardError
from tandem.rewards._calls import Outcome
from tandem.rewards._grader import HEADER, Ability, Call, Order
from tandem.rewards.base import Failure

Result = TypeVar("Result")

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from tandem.rewards._grader import main; main()"
"""What a worker runs; it searches where we search, so that what imports here imports there."""

_GRACE_SECONDS = 0.2
"""Waited past a deadline before it counts: our own event loop may have been late to read the answer."""

_CLOSE_SECONDS = 3.0
"""How long a worker may take to end by itself."""


class Died(Exception):
    """The process is gone or was killed; ``failure`` is what the call in progress gets."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Worker:
    """One grading process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, order: Order, seconds: float, log: Path | None) -> tuple[Worker, dict[str, Ability]]:
        """Start a process and wait until its rewards are ready; also tells how each of them may be called.

        Raises:
            RewardError: it does not start in ``seconds``, or a reward cannot be imported.
        """
        worker = cls(await _spawn(log))
        reason = f"rewards {', '.join(name for name, *_ in order.specs)} to be ready"
        try:
            await worker._send(pickle.dumps(order), seconds, reason)
            ready = await worker._receive(seconds, reason)
        except Died as error:
            seen = f"; see {log}" if log else ""
            raise RewardError(f"a grading process {error.failure.text} while it started{seen}") from error
        except BaseException:
            await worker.kill()
            raise
        if isinstance(ready, str):
            await worker.close()
            raise RewardError(ready)
        return worker, ready

    @property
    def alive(self) -> bool:
        """False once the process ended."""
        return self._process.returncode is None

    async def submit(self, rollouts: bytes, batches: Sequence[Sequence[Call]], seconds: float) -> None:
        """Hand over calls; their answers come from ``answer``, batch by batch.

        Raises:
            Died: the process crashed, or did not take them in time and was killed.
        """
        await self._send(pickle.dumps((batches, rollouts)), seconds, "a group to be taken")

    async def answer(self, seconds: float, reason: str) -> tuple[int, Outcome]:
        """The next answer, and which call of the batch it belongs to; ``reason`` says what is waited for.

        Raises:
            Died: the process crashed, or passed the deadline and was killed.
        """
        place, outcome = await self._receive(seconds, reason)
        return place, outcome

    async def kill(self) -> None:
        """End the process at once, and with it whatever its graders started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
                os.killpg(self._process.pid, signal.SIGKILL)  # its own group: start_new_session made it the leader
        self._stdin.close()
        who = f"grading process (pid {self._process.pid})"
        async with waits.waiting(waits.actor("grading"), "its end by SIGKILL", on=who):
            await self._process.wait()

    async def close(self) -> None:
        """Let the process end by itself, or else kill it."""
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_SECONDS)
        except TimeoutError:
            await self.kill()

    async def _send(self, body: bytes, seconds: float, reason: str) -> None:
        self._stdin.write(HEADER.pack(len(body)) + body)
        await self._within(self._stdin.drain(), seconds, reason)

    async def _receive(self, seconds: float, reason: str) -> Any:
        return pickle.loads(await self._within(self._frame(), seconds, reason))

    async def _frame(self) -> bytes:
        header = await self._stdout.readexactly(HEADER.size)
        return await self._stdout.readexactly(HEADER.unpack(header)[0])

    async def _within(self, doing: Coroutine[Any, Any, Result], seconds: float, reason: str) -> Result:
        task = asyncio.ensure_future(doing)
        # This registers the wait; what enforces its deadline is below, since the process has to be killed then.
        with waits.blocking("grading", reason, f"grading process (pid {self._process.pid})", seconds) as wait:
            try:
                done, _ = await asyncio.wait({task}, timeout=seconds)
                if not done:
                    done, _ = await asyncio.wait({task}, timeout=_GRACE_SECONDS)
                if done:
                    return task.result()
            except (asyncio.IncompleteReadError, ConnectionError):
                raise Died(Failure("crashed", await self._obituary())) from None
            finally:
                task.cancel()
            await self.kill()
            raise Died(Failure("timeout", f"took longer than {seconds:g} s and was stopped")) from wait.late()

    async def _obituary(self) -> str:
        await self.close()
        code = self._process.returncode or 0
        if code >= 0:
            return f"ended its process with exit code {code}"
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        return f"crashed its process ({name})"


async def _spawn(log: Path | None) -> asyncio.subprocess.Process:
    """Start the process; what its graders print goes to the log, or to our own stderr."""
    path = sys.path if os.getcwd() in sys.path or "" in sys.path else [*sys.path, os.getcwd()]
    with contextlib.ExitStack() as stack:
        try:
            stderr = None if log is None else stack.enter_context(log.open("ab"))
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOT, *path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is for the run, which saves first and then ends its workers itself
            )
        except OSError as error:
            raise RewardError(f"a grading process cannot be started: {error}") from error
