"""Handle of a grading process: start it, hand it calls, await each answer up to a deadline, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.errors import RewardError
from tandem.observability import waits
from tandem.processes import kill_group
from tandem.rewards.base import Failure
from tandem.rewards.grading.grader import HEADER, Ability, Order, RewardCall

_GRADER = "import sys; sys.path[:] = sys.argv[1:]; from tandem.rewards.grading.grader import main; main()"
"""What a worker runs; it searches where we search, so that what imports here imports there."""

_GRACE_SECONDS = 0.2
"""Waited past a deadline before it counts: our own event loop may have been late to read the answer."""

_CLOSE_SECONDS = 3.0
"""How long a worker may take to end by itself."""

_LONGEST = 16 << 20
"""Bytes of the longest message that is read."""


class WorkerDied(Exception):
    """The process is gone or was killed; ``failure`` is what the call in progress gets."""

    def __init__(self, failure: Failure, *, killed: bool = False) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.killed = killed
        """True if SIGKILL came from elsewhere, as from the kernel when memory runs out: the call may be innocent."""


class GradingProcess:
    """A grading process, as the trainer sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._stopped = False

    @classmethod
    async def start(cls, order: Order, seconds: float, log: Path | None) -> tuple[GradingProcess, dict[str, Ability]]:
        """Start a process and wait until its rewards are ready; also tells how each of them may be called.

        Raises:
            RewardError: it does not start in ``seconds``, or a reward cannot be imported.
        """
        worker = cls(await _spawn(log))
        rewards = ", ".join(order.specs)
        try:
            worker._send(pickle.dumps(order))
            until = time.monotonic() + seconds
            abilities = await worker.read(dict[str, Ability] | str, until, seconds, f"rewards {rewards} to be ready")
        except WorkerDied as error:
            seen = f"; see {log}" if log else ""
            raise RewardError(f"the grading process of {rewards} {error} while it started{seen}") from error
        except BaseException:
            await worker.kill()
            raise
        if isinstance(abilities, str):
            await worker.close()
            raise RewardError(abilities)
        return worker, abilities

    @property
    def alive(self) -> bool:
        """False once the process ended."""
        return self._process.returncode is None

    def submit(self, rollouts: bytes, batches: Sequence[Sequence[RewardCall]]) -> None:
        """Hand over calls; ``read`` gives their answers."""
        self._send(pickle.dumps((batches, rollouts)))

    async def read(self, kind: Any, until: float, seconds: float, reason: str) -> Any:
        """The next message.

        Args:
            kind: what it must be.
            until: when it must be here, on the monotonic clock.
            seconds: what the message about a missed deadline says.
            reason: what is waited for.

        Raises:
            WorkerDied: the process crashed, passed the deadline, or sent something else and was killed.
        """
        left = max(0.0, until - time.monotonic())
        try:
            # This registers the wait; what enforces its deadline is below, since the process has to be killed then.
            with waits.blocking("grading", reason, self._name, left) as wait:
                for timeout in (left, _GRACE_SECONDS):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(timeout):
                            line = await self._stdout.readline()
                            break
                else:
                    await self.kill()
                    late = Failure("timeout", f"took longer than {seconds:g} s and was stopped")
                    raise WorkerDied(late) from wait.late()
            if not line.endswith(b"\n"):
                raise await self._ended()
            return msgspec.json.decode(line, type=kind)
        except ValueError:  # a reward, or what it started, wrote there too
            raise await self.broken() from None

    async def broken(self) -> WorkerDied:
        """End a process whose messages make no sense; the error to raise."""
        await self.kill()
        return WorkerDied(Failure("crashed", "wrote to the pipe on which its grading process answers"))

    async def kill(self) -> None:
        """End the process at once, and with it whatever its rewards started."""
        if self.alive:
            self._stopped = True
            kill_group(self._process.pid)  # start_new_session made it the leader
        self._stdin.close()
        async with waits.waiting(waits.actor("grading"), "its end by SIGKILL", on=self._name):
            await self._process.wait()
        self._end_children()

    async def close(self) -> None:
        """Let the process end by itself, or else kill it; what its rewards started ends with it."""
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_SECONDS)
        except TimeoutError:
            await self.kill()
        self._end_children()

    def _end_children(self) -> None:
        """Kill what is left of the group that it led. No other process gets its pid while one of them lives."""
        if not Path(f"/proc/{self._process.pid}").exists():
            kill_group(self._process.pid)

    @property
    def _name(self) -> str:
        return f"grading process (pid {self._process.pid})"

    def _send(self, body: bytes) -> None:
        self._stdin.write(HEADER.pack(len(body)) + body)  # not awaited: the answers have a deadline

    async def _ended(self) -> WorkerDied:
        """What the end of the process means for the call in progress."""
        await self.close()
        code = self._process.returncode or 0
        if code >= 0:
            return WorkerDied(Failure("crashed", f"ended its process with exit code {code}"))
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        killed = -code == signal.SIGKILL and not self._stopped
        why = ", sent from elsewhere: is the machine out of memory?" if killed else ""
        return WorkerDied(Failure("crashed", f"crashed its process ({name}{why})"), killed=killed)


async def _spawn(log: Path | None) -> asyncio.subprocess.Process:
    """Start the process; what its rewards print goes to the log, or to our own stderr."""
    path = sys.path if os.getcwd() in sys.path or "" in sys.path else [*sys.path, os.getcwd()]
    with contextlib.ExitStack() as stack:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _GRADER, *path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST,
                stderr=None if log is None else stack.enter_context(log.open("ab")),
                start_new_session=True,  # Ctrl-C is for the run, which saves first and then ends its workers itself
            )
        except OSError as error:
            raise RewardError(f"a grading process cannot be started: {error}") from error
