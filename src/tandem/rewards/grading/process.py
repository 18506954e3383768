"""Handle of a grading process: start it, hand it calls, await each answer up to a deadline, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import RewardError
from tandem.observability import waits
from tandem.rewards.base import Failure
from tandem.rewards.grading.calls import Outcome
from tandem.rewards.grading.grader import HEADER, Ability, Order, RewardCall

Result = TypeVar("Result")

_GRADER = (
    "import sys; sys.path[:] = sys.argv[2:]; from tandem.rewards.grading.grader import main; main(int(sys.argv[1]))"
)
"""What a worker runs; it searches where we search, so that what imports here imports there."""

CallAnswer = tuple[int, Outcome, float]
"""Which call of the batch in progress, what it gave, and when, on the clock of all processes."""

_GRACE_SECONDS = 0.2
"""Waited past a deadline before it counts: our own event loop may have been late to read the answer."""

_CLOSE_SECONDS = 3.0
"""How long a worker may take to end by itself."""


class Died(Exception):
    """The process is gone or was killed; ``failure`` is what the call in progress gets."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class GradingProcess:
    """A grading process, as the run sees it."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._pipe: int | None = pipe
        self._buffer = bytearray()
        self._answers: deque[CallAnswer] = deque()
        self._early: dict[int, CallAnswer] = {}
        self._number = 0
        self._notice: asyncio.Task[bytes] | None = None

    @classmethod
    async def start(cls, order: Order, seconds: float, log: Path | None) -> tuple[GradingProcess, dict[str, Ability]]:
        """Start a process and wait until its rewards are ready; also tells how each of them may be called.

        Raises:
            RewardError: it does not start in ``seconds``, or a reward cannot be imported.
        """
        worker = cls(*await _spawn(log))
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

    async def submit(self, rollouts: bytes, batches: Sequence[Sequence[RewardCall]], seconds: float) -> None:
        """Hand over calls; their answers come from ``answer``, batch by batch.

        Raises:
            Died: the process crashed, or did not take them in time and was killed.
        """
        await self._send(pickle.dumps((batches, rollouts)), seconds, "a group to be taken")

    async def answer(self, until: float, look: float, reason: str) -> CallAnswer:
        """The next answer. Several that were given meanwhile are there at once.

        Args:
            until: when it must have been given, on the event loop's clock.
            look: seconds after which it is looked what was given without a word.
            reason: what is waited for.

        Raises:
            Died: the process crashed, or passed the deadline and was killed.
        """
        while not self._answers and not self._drained():
            left = until - time.monotonic()
            self._notice = self._notice or asyncio.ensure_future(self._frame())
            with waits.blocking("grading", reason, self._name, max(0.0, left)) as wait:
                done, _ = await asyncio.wait({self._notice}, timeout=max(0.0, min(left, look)))
                if not done and left <= look:
                    done, _ = await asyncio.wait({self._notice}, timeout=_GRACE_SECONDS)
                if not done and left <= look and not self._drained():
                    await self.kill()
                    raise Died(Failure("timeout", "took too long and was stopped")) from wait.late()
            if done:
                await self._heard()
        return self._answers.popleft()

    def there(self) -> CallAnswer | None:
        """The next answer, if it was read already."""
        return self._answers.popleft() if self._answers else None

    async def _heard(self) -> None:
        """Take what the process told of, or what was left of it."""
        notice, self._notice = self._notice, None
        assert notice is not None
        self._drained()
        try:
            body = notice.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self._answers:  # else they come first, and the next that asks hears of it again
                raise Died(Failure("crashed", await self._obituary())) from None
            return
        if body:
            self._arrived(body)

    def _drained(self) -> bool:
        """Whether there are answers, once all that was written is read."""
        while self._pipe is not None:
            try:
                piece = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                break
            if not piece:
                break
            self._buffer += piece
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            self._arrived(self._buffer[HEADER.size : end])
            del self._buffer[:end]
        return bool(self._answers)

    def _arrived(self, body: bytes | bytearray) -> None:
        """File an answer; one that is too large for the pipe may come later than those after it."""
        number, *answer = pickle.loads(body)
        self._early[number] = (answer[0], answer[1], answer[2])
        while self._number in self._early:
            self._answers.append(self._early.pop(self._number))
            self._number += 1

    async def kill(self) -> None:
        """End the process at once, and with it whatever its graders started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
                os.killpg(self._process.pid, signal.SIGKILL)  # its own group: start_new_session made it the leader
        self._let_go()
        async with waits.waiting(waits.actor("grading"), "its end by SIGKILL", on=self._name):
            await self._process.wait()
        self._end_children()

    async def close(self) -> None:
        """Let the process end by itself, or else kill it; what its graders started ends with it."""
        self._let_go()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_SECONDS)
        except TimeoutError:
            await self.kill()
        self._end_children()

    def _end_children(self) -> None:
        """Kill what is left of the group that it led. No other process gets its pid while one of them lives."""
        if not Path(f"/proc/{self._process.pid}").exists():
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def _name(self) -> str:
        return f"grading process (pid {self._process.pid})"

    def _let_go(self) -> None:
        """Close what leads to the process."""
        self._stdin.close()
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    async def _send(self, body: bytes, seconds: float, reason: str) -> None:
        self._stdin.write(HEADER.pack(len(body)) + body)
        if self._stdin.is_closing() or self._stdin.transport.get_write_buffer_size():
            await self._within(self._stdin.drain(), seconds, reason)

    async def _receive(self, seconds: float, reason: str) -> Any:
        """What a process says that has no job yet."""
        return pickle.loads(await self._within(self._frame(), seconds, reason))

    async def _frame(self) -> bytes:
        header = await self._stdout.readexactly(HEADER.size)
        return await self._stdout.readexactly(HEADER.unpack(header)[0])

    async def _within(self, doing: Coroutine[Any, Any, Result], seconds: float, reason: str) -> Result:
        task = asyncio.ensure_future(doing)
        # This registers the wait; what enforces its deadline is below, since the process has to be killed then.
        with waits.blocking("grading", reason, self._name, seconds) as wait:
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


async def _spawn(log: Path | None) -> tuple[asyncio.subprocess.Process, int]:
    """Start the process, and the pipe of its answers; what its graders print goes to the log, or to our own stderr."""
    path = sys.path if os.getcwd() in sys.path or "" in sys.path else [*sys.path, os.getcwd()]
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
        try:
            stderr = None if log is None else stack.enter_context(log.open("ab"))
            ours, theirs = os.pipe()
            failed.callback(os.close, ours)
            stack.callback(os.close, theirs)
            os.set_blocking(ours, False)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _GRADER, str(theirs), *path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C is for the run, which saves first and then ends its workers itself
            )
        except OSError as error:
            raise RewardError(f"a grading process cannot be started: {error}") from error
        failed.pop_all()
    return process, ours
