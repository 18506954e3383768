"""Grading process: reads jobs from its stdin, answers call by call, dies with its parent.

Everything happens in the main thread, where signals arrive (math-verify sets an alarm); a second thread only
reads, so that the end of the parent is noticed while a grader hangs. Messages are pickles behind their length.

Each answer is written at once to a pipe that the parent does not watch, so that it is there whatever the next call does
to this process; the parent is told on stdout when the job is done, or before the pipe is full.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import io
import os
import pickle
import pkgutil
import queue
import struct
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeVar

from tandem.errors import RewardError, message_of, raised, redacted
from tandem.lazy import asyncio
from tandem.rewards.base import Failure, Reward
from tandem.rewards.grading.calls import Called, Outcome, called, traceback_of
from tandem.types import Rollout

T = TypeVar("T")

HEADER = struct.Struct("!I")
"""Length of the message that follows."""

_GRACE = 1.0
"""Seconds a grader may still run after the parent is gone."""


class RewardCall(NamedTuple):
    """One call of one reward function."""

    name: str
    """Name of the reward."""
    rows: tuple[int, ...]
    """Places of its rollouts in the group: one, or for a group function several."""
    seconds: float
    """How long it may take."""


class Ability(NamedTuple):
    """Ways in which a reward may be called: per group or per rollout, concurrently or one by one."""

    takes_groups: bool
    """True if one call is for all siblings."""
    is_async: bool
    """True if its calls may go on side by side."""


class Order(NamedTuple):
    """First message to a grading process: the rewards to load."""

    specs: Sequence[tuple[str, str, str | bytes]]
    """Name of each reward, what messages call it, and its import path or its pickle."""
    steps: int | None
    """Steps of the run, for functions that ask; None where that is not known."""


ROOM = 8 << 10
"""Bytes of answers that the pipe holds for sure, before the parent is told to read."""


class AnswerPipe:
    """The pipe on which a grading process sends its answers."""

    def __init__(self, pipe: int, wire: BinaryIO) -> None:
        self._pipe = pipe
        self._wire = wire
        self._process = os.getpid()
        self._unread = 0
        self._number = 0

    def give(self, place: int, outcome: Outcome, *, tell: bool) -> None:
        """One call's, with its number and the moment at which it was done, from which the next call's time counts.

        ``tell`` has the parent read it at once. A child that a reward forked, and that came back from it, ends here:
        its answer is the grader's own.
        """
        if os.getpid() != self._process:
            os._exit(0)
        body = pickle.dumps((self._number, place, outcome, time.monotonic()))
        self._number += 1
        if len(body) > ROOM:
            self._tell(body)
            return
        if self._unread + len(body) > ROOM:
            self._tell()
        os.write(self._pipe, HEADER.pack(len(body)) + body)
        self._unread += HEADER.size + len(body)
        if tell:
            self._tell()

    def _tell(self, body: bytes = b"") -> None:
        self._wire.write(HEADER.pack(len(body)) + body)
        self._wire.flush()
        self._unread = 0


class _EventLoop:
    """The event loop that runs what is async. Where nothing is, none is made, and asyncio is not imported."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def make(self) -> asyncio.Runner:
        """Have it ready."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns."""
        return self.make().run(coroutine)

    def close(self) -> None:
        """End the tasks that are left."""
        if self._runner is not None:
            self._runner.close()


@dataclass(frozen=True, slots=True)
class _Grader:
    """Rewards that are ready, and the way back to the run."""

    rewards: dict[str, Called]
    """By name."""
    steps: int | None
    """Of the whole run."""
    answers: AnswerPipe
    """Where answers go."""
    loop: _EventLoop
    """Runs what is async."""

    def serve(self, job: bytes) -> None:
        """Grade one job: batches in order, an answer after each call, so that the parent knows which one hangs.

        A batch is one call, or several async ones that go on side by side.
        """
        batches, packed = pickle.loads(job)
        try:
            rollouts: Sequence[Rollout] = pickle.loads(packed)
        except Exception as error:  # a task may carry objects of a module that cannot be imported here
            lost = Outcome(Failure("raised", f"could not be given the rollouts: {message_of(error)}"))
            for batch in batches:
                for place in range(len(batch)):
                    self.answers.give(place, lost, tell=True)
            return
        for number, batch in enumerate(batches, 1):
            if self.rewards[batch[0].name].is_async:
                self.loop.run(self._together(batch, rollouts))
            else:
                self.answers.give(0, self._alone(batch[0], rollouts), tell=number == len(batches))

    def _alone(self, call: RewardCall, rollouts: Sequence[Rollout]) -> Outcome:
        reward = self.rewards[call.name]
        try:
            value, log = reward.begin([rollouts[row] for row in call.rows], self.steps)
            return reward.outcome(self._awaited(value), log)
        except BaseException as error:  # boundary of one call: whatever a grader does costs its rollouts only
            return _lost(call, rollouts, error)

    async def _together(self, batch: Sequence[RewardCall], rollouts: Sequence[Rollout]) -> None:
        async def one(place: int, call: RewardCall) -> None:
            self.answers.give(place, await self._in_time(call, rollouts), tell=True)

        await asyncio.gather(*(one(place, call) for place, call in enumerate(batch)))

    async def _in_time(self, call: RewardCall, rollouts: Sequence[Rollout]) -> Outcome:
        """One of several calls: what it waits for too long is given up, and the others go on."""
        reward = self.rewards[call.name]
        limit = asyncio.timeout(call.seconds)
        try:
            async with limit:
                value, log = reward.begin([rollouts[row] for row in call.rows], self.steps)
                return reward.outcome(await value, log)
        except BaseException as error:  # as above
            if limit.expired():
                return Outcome(Failure("timeout", f"took longer than {call.seconds:g} s and was stopped"))
            return _lost(call, rollouts, error)

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        return self.loop.run(wait())


def main(pipe: int) -> None:
    """Serve until stdin ends; answers go to the pipe with this number."""
    os.set_inheritable(pipe, False)  # what graders start has nothing to do with it
    # Graders may print and read: the pipes move out of their way first.
    wire_in, wire_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Children that a reward forks must not keep them open: their end tells the parent of the grader's.
    os.register_at_fork(after_in_child=partial(_close, wire_in.fileno(), wire_out.fileno(), pipe))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a grader printed must survive its crash, and no character may cost a reward.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()
    jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(wire_in, jobs), daemon=True, name="wire").start()
    first = jobs.get()
    if first is None:
        return
    order: Order = pickle.loads(first)
    gc.disable()  # it would look through what is imported again and again
    rewards = _load(order.specs)
    if isinstance(rewards, str):
        _send(wire_out, rewards)
        return
    _send(wire_out, {name: Ability(reward.takes_groups, reward.is_async) for name, reward in rewards.items()})
    with closing(_EventLoop()) as loop:
        if any(reward.is_async for reward in rewards.values()):
            loop.make()  # not in the time that the first call has
        gc.collect()
        gc.freeze()  # a library of symbols is half a million objects; looking through them takes longer than a group
        gc.enable()
        grader = _Grader(rewards, order.steps, AnswerPipe(pipe, wire_out), loop)
        while (job := jobs.get()) is not None:
            grader.serve(job)


def _close(*handles: int) -> None:
    for handle in handles:
        os.close(handle)


def _receive(wire: BinaryIO, jobs: queue.SimpleQueue[bytes | None]) -> None:
    """Queue messages; when the parent is gone, leave the main thread a moment and then take it along."""
    while len(header := wire.read(HEADER.size)) == HEADER.size:
        jobs.put(wire.read(HEADER.unpack(header)[0]))
    jobs.put(None)
    time.sleep(_GRACE)
    os._exit(0)


def _send(wire: BinaryIO, message: object) -> None:
    body = pickle.dumps(message)
    wire.write(HEADER.pack(len(body)) + body)
    wire.flush()


def _load(specs: Sequence[tuple[str, str, str | bytes]]) -> dict[str, Called] | str:
    """Import every reward and get it ready; a text says which one failed and why."""
    rewards = {}
    for name, who, spec in specs:
        try:
            thing = pkgutil.resolve_name(spec) if isinstance(spec, str) else pickle.loads(spec)
        except BaseException as error:  # user code may raise anything while it is imported
            sys.stderr.write(redacted(traceback.format_exc()))
            return f"{who} cannot be imported: {error if isinstance(error, ImportError) else message_of(error)}"
        if not callable(thing) or isinstance(thing, type):
            return f"{who} is a {type(thing).__name__}; expected a function of a rollout, or f(completions, **columns)"
        try:
            if isinstance(thing, Reward):
                thing.prepare()
            rewards[name] = called(thing)
        except BaseException as error:
            sys.stderr.write(redacted(traceback.format_exc()))
            return str(error) if isinstance(error, RewardError) else f"{who} cannot be used: {message_of(error)}"
    return rewards


def _lost(call: RewardCall, rollouts: Sequence[Rollout], error: BaseException) -> Outcome:
    """The outcome of a call that raised; its traceback goes to the log, under the names of the reward and rollouts."""
    who = ", ".join(rollouts[row].id for row in call.rows)
    sys.stdout.write(f"reward {call.name!r} raised for {who}:\n{traceback_of(error)}\n")
    return Outcome(Failure("raised", raised(error)))
