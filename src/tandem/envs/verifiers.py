"""Environments of the verifiers package, played by itself in the interpreter that has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path

from tandem.envs.base import Chat, Environment, Split
from tandem.envs.data.split import Tasks, digest, some, split_of
from tandem.errors import EnvError, bounded
from tandem.observability import waits
from tandem.types import Json, Message, Rollout, Task

log = logging.getLogger(__name__)

_RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs the worker with the working directory, where the environment may be, first among what is imported from."""
_WORKER = Path(__file__).with_name("_verifiers_worker.py")
_CANCEL_SECONDS = 5.0
"""A process that does not end an episode for so long hangs, and is killed."""


@dataclass(frozen=True, kw_only=True)
class Verifiers(Environment):
    """Any installed environment of verifiers: its data, its rollouts and its rubric.

    Its rubric's reward, weights included, is the reward ``environment``; each function of it is a metric.
    """

    id: str
    """Name of the environment, as ``vf.load_environment`` takes it, or of a taskset of verifiers 0.4."""
    args: dict[str, Json] = field(default_factory=dict)
    """What else ``vf.load_environment`` is given; of 0.4, what a file of its own has under ``env``."""
    python: str = ""
    """Interpreter that has verifiers and the environment; empty: this one."""
    test_share: float = bounded(0.2, below=1)
    """Share of rows held out where the environment has no evaluation data of its own."""
    timeout_seconds: float = bounded(600.0, above=0)
    """How long one task may take."""

    @property
    def default_rewards(self) -> Mapping[str, Json]:
        return {"environment": 1.0}

    def tasks(self, split: Split) -> Sequence[Task]:
        """Rows of the environment's data, which is loaded now.

        Raises:
            EnvError: it cannot be loaded, or the split has no row.
        """
        read = self._worker().ask("rows", split=split)[1].result()
        rows, of = read["rows"], read["of"]
        places: Sequence[int] = range(len(rows))
        if read["shared"]:
            places = [n for n in places if split_of(_question(rows[n]), self.test_share) == split]
        remedy = "change test_share, or args"
        return Tasks(some(places, f"{self.name} ({self.id})", split, remedy), lambda n: self._task(rows[n], of, n))

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        async with chat.serve() as url:
            row = {"split": task.meta["split"], "row": task.meta["row"]}
            owner, play = f"rollout {chat.id}", {"key": chat.id, "url": url, **row}
            outcome = await self._worker().answer(self.timeout_seconds, owner, "play", **play)
        if outcome is None:
            return {}
        if len(outcome["turn_rewards"]) == len(chat.turns):
            for turn, reward in enumerate(outcome["turn_rewards"]):
                chat.mark(turn, reward=reward)
        return _metrics(outcome)

    async def finish(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        together = [r.id for r in rollouts if r.status == "ok" and "reward" not in r.metrics]
        if not together:
            return rollouts
        owner = f"rollouts group {together[0].rpartition('/')[0]}"
        outcomes = await self._worker().answer(self.timeout_seconds, owner, "score", keys=together)
        scores = {id: _metrics(outcome) for id, outcome in zip(together, outcomes, strict=True)}
        return [replace(r, metrics={**r.metrics, **scores.get(r.id, {})}) for r in rollouts]

    def check(self, task: Task) -> None:
        """None: only the environment knows what it takes for right."""
        return

    @cached_property
    def _workers(self) -> list[_Worker]:
        return []

    def _worker(self) -> _Worker:
        """The process, started where there is none or it has ended."""
        if not self._workers or self._workers[0].ended:
            self._workers[:] = [_Worker(self.python or sys.executable, self.id, self.args)]
        return self._workers[0]

    def _task(self, row: Mapping[str, Json], split: Split, place: int) -> Task:
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        messages = tuple(Message(role=each["role"], content=_text(each.get("content"))) for each in prompt)
        extra = {name: value for name, value in row.items() if name not in ("prompt", "answer", "split", "row")}
        return Task(
            id=f"{split}/{place}/{digest(_question(row))}",
            env=self.name,
            prompt=messages,
            answer=str(row.get("answer") or ""),
            meta={**extra, "split": split, "row": place},
        )


def _question(row: Mapping[str, Json]) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _text(content: Json) -> str:
    parts = content if isinstance(content, list) else [content or ""]
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def _metrics(outcome: Mapping[str, Json]) -> dict[str, float]:
    """Numbers of the environment; that of its rubric is ``reward``, which is what the reward environment takes."""
    return {**outcome["metrics"], "reward": outcome["reward"]}


class _Worker:
    """Handle of the environment's process, which ends with this one, or when nothing holds the handle."""

    def __init__(self, python: str, id: str, args: Mapping[str, Json]) -> None:
        """Start it; raises EnvError if there is no such interpreter."""
        if (interpreter := shutil.which(python)) is None:
            raise EnvError(f"python {python!r}: there is no such interpreter; name one that has verifiers")
        self._process = subprocess.Popen(
            [interpreter, "-c", _RUN, str(_WORKER), id, json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # it is killed with all that it started
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            | {"PATH": f"{Path(interpreter).parent}:{os.environ.get('PATH', '')}"},  # its programs first
        )
        self.name = f"environment {id} (pid {self._process.pid})"
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

    async def answer(self, seconds: float, owner: str, method: str, **options: Json) -> Json:
        """Ask for something and await it; raises EnvError if that fails or takes too long."""
        number, future = self.ask(method, **options)
        try:
            async with asyncio.timeout(seconds):
                return await waits.wait(asyncio.wrap_future(future), owner=owner, reason=method, on=self.name)
        except TimeoutError:
            raise EnvError(f"{self.name} took longer than {seconds:g} s to {method}; raise timeout_seconds") from None
        finally:
            if future.cancelled():
                await self._cancel(number)

    async def _cancel(self, number: int) -> None:
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


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
        for line in process.stdout:
            requests.answer(**json.loads(line))
    status = process.wait()
    _kill(process)  # what it started
    requests.close(status)
    with requests.lock, contextlib.suppress(BrokenPipeError):
        process.stdin.close()
