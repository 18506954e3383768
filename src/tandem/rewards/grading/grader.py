"""Grading process: reads jobs from stdin, writes one line of JSON for each call, and ends with its parent.

Jobs are pickles: they come from the trainer. Answers are JSON, because rewards can write to any descriptor of this
process: what the trainer reads must not be code. Calls run in the main thread, where signals arrive (math-verify sets
an alarm); a second thread reads, so that the end of the parent is noticed while a reward hangs.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import inspect
import io
import os
import pickle
import queue
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import msgspec

from tandem.errors import SHOWN_TEXT, RewardError, message_of, raised, redacted
from tandem.importing import importing
from tandem.lazy import asyncio
from tandem.rewards.base import Failure, Outcome, Reward
from tandem.rewards.grading.calls import Called, called
from tandem.types import Rollout

HEADER = struct.Struct("!I")
"""Length of the job that follows."""

_GRACE = 1.0
"""Seconds a reward may still run after the parent is gone."""


class RewardCall(NamedTuple):
    """One call of one reward function."""

    number: int
    """Unique among the calls of a pool."""
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

    specs: Mapping[str, bytes]
    """The pickle of each reward by its name."""
    steps: int | None
    """Steps of the run, for functions that ask; None where that is not known."""


@functools.cache
def _runner() -> asyncio.Runner:
    """The event loop that runs what is async; asyncio is imported only where something is."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


@dataclass(frozen=True, slots=True)
class _Grader:
    """Rewards that are ready, and the way back to the trainer."""

    rewards: dict[str, Called]
    """By name."""
    steps: int | None
    """Of the whole run."""
    wire: BinaryIO
    """Where answers go."""
    process: int
    """Process id, which is another in a child that a reward forked."""

    def serve(self, job: bytes) -> None:
        """Make the calls of a job: batches in order; a batch is one call, or several async ones side by side."""
        batches, packed = pickle.loads(job)
        try:
            rollouts: Sequence[Rollout] = pickle.loads(packed)
        except Exception as error:  # a task may carry objects of a module that cannot be imported here
            lost = Failure("raised", f"could not be given the rollouts: {message_of(error)}")
            for call in (call for batch in batches for call in batch):
                self._give(call, Outcome([lost] * len(call.rows)))
            return
        for batch in batches:
            if self.rewards[batch[0].name].is_async:
                _runner().run(self._side_by_side(batch, rollouts))
            else:
                self._give(batch[0], self._outcome(batch[0], rollouts))

    def _give(self, call: RewardCall, outcome: Outcome) -> None:
        """Write an answer. A forked child that returns from the reward ends here: the answer is its parent's."""
        if os.getpid() != self.process:
            os._exit(0)
        try:
            line = msgspec.json.encode((call.number, outcome))
        except Exception as error:  # a verdict or a metric of the user's that no message can carry
            lost = Failure("bad_value", f"returned what cannot be sent to the trainer: {type(error).__name__}")
            line = msgspec.json.encode((call.number, Outcome([lost] * len(call.rows))))
        self.wire.write(line + b"\n")
        self.wire.flush()

    def _outcome(self, call: RewardCall, rollouts: Sequence[Rollout]) -> Outcome:
        reward = self.rewards[call.name]
        try:
            value, log = reward.begin([rollouts[row] for row in call.rows], self.steps)
            return reward.outcome(_runner().run(value) if inspect.iscoroutine(value) else value, log)
        except BaseException as error:  # boundary of one call: whatever a reward does costs its rollouts only
            return _lost(call, rollouts, error)

    async def _side_by_side(self, batch: Sequence[RewardCall], rollouts: Sequence[Rollout]) -> None:
        await asyncio.gather(*(self._give_in_time(call, rollouts) for call in batch))

    async def _give_in_time(self, call: RewardCall, rollouts: Sequence[Rollout]) -> None:
        """One of several calls: it is given up when it waits for too long, and the others go on."""
        reward = self.rewards[call.name]
        limit = asyncio.timeout(call.seconds)
        try:
            async with limit:
                value, log = reward.begin([rollouts[row] for row in call.rows], self.steps)
                outcome = reward.outcome(await value, log)
        except BaseException as error:  # as above
            late = Failure("timeout", f"took longer than {call.seconds:g} s and was stopped")
            outcome = Outcome([late] * len(call.rows)) if limit.expired() else _lost(call, rollouts, error)
        self._give(call, outcome)


def main() -> None:
    """Serve until stdin ends."""
    # Rewards may print and read: the pipes move out of their way first.
    wire_in, wire_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Children that a reward forks must not keep them open: their end tells the parent of the grader's.
    for wire in (wire_in, wire_out):
        os.register_at_fork(after_in_child=functools.partial(os.close, wire.fileno()))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a reward printed must survive its crash, and no character may cost a reward.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()
    jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(wire_in, jobs), daemon=True, name="wire").start()
    first = jobs.get()
    if first is None:
        return
    order: Order = pickle.loads(first)
    rewards = _load(order.specs)
    if isinstance(rewards, str):
        wire_out.write(msgspec.json.encode(rewards) + b"\n")
        wire_out.flush()
        return
    abilities = {name: Ability(reward.takes_groups, reward.is_async) for name, reward in rewards.items()}
    wire_out.write(msgspec.json.encode(abilities) + b"\n")
    wire_out.flush()
    gc.freeze()  # a library of symbols is half a million objects; looking through them takes longer than a group
    grader = _Grader(rewards, order.steps, wire_out, os.getpid())
    while (job := jobs.get()) is not None:
        grader.serve(job)


def _receive(wire: BinaryIO, jobs: queue.SimpleQueue[bytes | None]) -> None:
    """Queue jobs; when the parent is gone, leave the main thread a moment and then take it along."""
    while len(header := wire.read(HEADER.size)) == HEADER.size:
        jobs.put(wire.read(HEADER.unpack(header)[0]))
    jobs.put(None)
    time.sleep(_GRACE)
    os._exit(0)


def _load(specs: Mapping[str, bytes]) -> dict[str, Called] | str:
    """Import every reward and get it ready; a text says which one failed and why."""
    rewards = {}
    for name, packed in specs.items():
        try:
            with importing():
                reward: Reward = pickle.loads(packed)
            reward.prepare()
            rewards[name] = called(reward)
        except BaseException as error:  # user code may raise anything
            sys.stderr.write(redacted(traceback.format_exc()))
            text = f"reward {name!r} cannot be used: {message_of(error)}"
            return str(error) if isinstance(error, RewardError) else text
    return rewards


def _lost(call: RewardCall, rollouts: Sequence[Rollout], error: BaseException) -> Outcome:
    """The outcome of a call that raised; its traceback goes to the log, under the names of the reward and rollouts."""
    who = ", ".join(rollouts[row].id for row in call.rows)
    trace = "".join(redacted(line)[: 2 * SHOWN_TEXT] for line in traceback.format_exception(error))
    sys.stdout.write(f"reward {call.name!r} raised for {who}:\n{trace}\n")
    text = raised(error).encode(errors="backslashreplace").decode()  # it may hold half of a surrogate pair
    return Outcome([Failure("raised", text)] * len(call.rows))
