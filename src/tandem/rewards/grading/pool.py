"""Pool of grading processes with the same rewards: each grades one group at a time, and is replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.observability import waits
from tandem.rewards.base import Failure, Reward
from tandem.rewards.grading.calls import Outcome
from tandem.rewards.grading.grader import Ability, Order, RewardCall
from tandem.rewards.grading.process import CallAnswer, Died, GradingProcess

_LATE = 1.0
"""Seconds that a process has to say that async calls of it passed their deadline, before it is killed."""

Batches = Sequence[Sequence[RewardCall]]
"""Calls in order; those of one batch are async and go on side by side."""

AnyReward = Reward | Callable[..., Any] | str
"""A reward, a plain function, or the import path of one."""


@dataclass(slots=True)
class _WorkerPlace:
    """A place for a worker; empty after its worker died, until the next group needs one."""

    worker: GradingProcess | None = None


class Pool:
    """Grading processes that share a set of rewards."""

    def __init__(
        self,
        rewards: Mapping[str, AnyReward],
        order: Order,
        *,
        size: int,
        timeout: float,
        log: Path | None,
        counts: Counter[str],
    ) -> None:
        """Nothing starts yet.

        Args:
            rewards: By name.
            order: What each process is told first.
            size: Processes.
            timeout: Seconds one reward may take for one rollout, where it does not say itself how long a call may.
            log: File for what graders print; None: our own stderr.
            counts: Where processes that had to be replaced are counted, as restarts.
        """
        parts = {name: reward for name, reward in rewards.items() if isinstance(reward, Reward)}
        self._own_seconds = {n: part.call_seconds for n, part in parts.items() if part.call_seconds is not None}
        self._start_seconds = max([120.0, *(part.start_seconds for part in parts.values())])
        self._names = list(rewards)
        self._order = order
        self._timeout = timeout
        self._log = log
        self._counts = counts
        self._places = [_WorkerPlace() for _ in range(size)]
        self._free: asyncio.Queue[_WorkerPlace] = asyncio.Queue()
        self._abilities: dict[str, Ability] = {}

    async def open(self) -> None:
        """Start all workers at once and wait until they are ready; raises as ``grade``."""
        started = await asyncio.gather(*(self._fill(place) for place in self._places), return_exceptions=True)
        failed = [outcome for outcome in started if isinstance(outcome, BaseException)]
        if failed:
            await self.close()
            raise failed[0]
        for place in self._places:
            self._free.put_nowait(place)

    async def close(self) -> None:
        """End all workers."""
        living = [place.worker for place in self._places if place.worker is not None]
        for place in self._places:
            place.worker = None
        await asyncio.gather(*(worker.close() for worker in living))

    async def grade(self, rollouts: bytes, rows: tuple[int, ...], group: str) -> dict[RewardCall, Outcome]:
        """Every reward's outcomes for these rows of a group.

        Raises:
            RewardError: a worker had to be replaced and the new one does not start, or does not in time.
        """
        async with self._free_place() as place:
            outcomes = await self._judged(place, rollouts, self._plan(rows), group)
            for call in [call for call, outcome in outcomes.items() if self._hides_a_culprit(call, outcome)]:
                outcomes |= await self._isolated(place, rollouts, call, outcomes.pop(call), group)
        return outcomes

    def _plan(self, rows: tuple[int, ...]) -> Batches:
        """All calls for a group: one per rollout and reward, and one per reward that takes the group whole."""
        singly = [name for name in self._names if not self._abilities[name].takes_groups]
        whole = [name for name in self._names if self._abilities[name].takes_groups]
        calls = [self._call(name, (row,)) for row in rows for name in singly]
        return self._batches([*calls, *(self._call(name, rows) for name in whole)])

    def _call(self, name: str, rows: tuple[int, ...]) -> RewardCall:
        return RewardCall(name, rows, self._own_seconds.get(name, self._timeout * len(rows)))

    def _batches(self, calls: Sequence[RewardCall]) -> Batches:
        """Async calls together, and then each other one by itself."""
        together = [call for call in calls if self._abilities[call.name].is_async]
        return [*([together] if together else []), *([call] for call in calls if call not in together)]

    @contextlib.asynccontextmanager
    async def _free_place(self) -> AsyncIterator[_WorkerPlace]:
        if self._free.empty():
            async with waits.waiting(waits.actor("grading"), "a free grading process", on="grading"):
                place = await self._free.get()
        else:
            place = self._free.get_nowait()
        try:
            yield place
        except BaseException:
            if place.worker is not None:  # it may still be busy with what nothing waits for any more
                await place.worker.kill()
                place.worker = None
            raise
        finally:
            self._free.put_nowait(place)

    async def _fill(self, place: _WorkerPlace) -> GradingProcess:
        """The place's worker, started if need be."""
        if place.worker is None or not place.worker.alive:
            place.worker, self._abilities = await GradingProcess.start(self._order, self._start_seconds, self._log)
        return place.worker

    async def _judged(
        self, place: _WorkerPlace, rollouts: bytes, batches: Batches, group: str
    ) -> dict[RewardCall, Outcome]:
        """Make the calls. One that kills its worker fails, and the others go on in a new worker.

        Of several that were under way then, each goes again by itself. The other rewards of a rollout that killed
        a worker are skipped: it is lost already.
        """
        outcomes: dict[RewardCall, Outcome] = {}
        waiting = deque(batches)
        while waiting:
            worker = await self._fill(place)
            suspects = dict(enumerate(waiting[0]))
            try:
                await worker.submit(rollouts, list(waiting), self._timeout)
                begun = time.monotonic()
                while waiting:
                    suspects = dict(enumerate(waiting[0]))
                    look = min(call.seconds for batch in waiting for call in batch)
                    for _ in waiting[0]:
                        index, outcome, ended = await self._answer(worker, waiting[0], begun, look, group)
                        outcomes[suspects.pop(index)] = outcome
                    begun = ended
                    waiting.popleft()
            except Died as death:
                place.worker = None
                self._counts["restarts"] += 1
                waiting.popleft()
                if len(suspects) > 1:
                    waiting.extendleft([call] for call in reversed(suspects.values()))
                    continue
                (culprit,) = suspects.values()
                outcomes[culprit] = Outcome(_blame(death.failure, culprit))
                if len(culprit.rows) == 1:
                    waiting = deque(_without(waiting, culprit.rows))
        return outcomes

    async def _answer(
        self, worker: GradingProcess, batch: Sequence[RewardCall], begun: float, look: float, group: str
    ) -> CallAnswer:
        """The next answer of a batch that began at a time."""
        if (there := worker.there()) is not None:
            return there
        late = _LATE if self._abilities[batch[0].name].is_async else 0.0
        until = begun + max(call.seconds for call in batch) + late
        names = ", ".join({call.name: None for call in batch})
        return await worker.answer(until, look, f"reward {names} of group {group}")

    def _hides_a_culprit(self, call: RewardCall, outcome: Outcome) -> bool:
        """True if a group's call failed, and each rollout alone may show which one it was."""
        failed = outcome.verdicts
        if len(call.rows) == 1 or not isinstance(failed, Failure) or failed.costs == "run":
            return False
        return failed.reason != "timeout" or call.name not in self._own_seconds  # such a call would be as long again

    async def _isolated(
        self, place: _WorkerPlace, rollouts: bytes, call: RewardCall, failed: Outcome, group: str
    ) -> dict[RewardCall, Outcome]:
        """Outcomes of a group call that failed: each rollout alone shows the culprits, the others go again together."""
        singly = self._batches([self._call(call.name, (row,)) for row in call.rows])
        alone = await self._judged(place, rollouts, singly, group)
        culprits = {one: got for one, got in alone.items() if _failed(got)}
        if not culprits:
            return {call: failed}
        guilty = {one.rows for one in culprits}
        rest = tuple(row for row in call.rows if (row,) not in guilty)
        return culprits | (await self._judged(place, rollouts, [[self._call(call.name, rest)]], group) if rest else {})


def _failed(outcome: Outcome) -> bool:
    """True if the call of a single rollout gave no verdict of it."""
    return isinstance(outcome.verdicts, Failure) or isinstance(outcome.verdicts[0], Failure)


def _blame(failure: Failure, culprit: RewardCall) -> Failure:
    """A failure of the process as that of the call it was busy with."""
    if failure.reason != "timeout":
        return failure
    return Failure("timeout", f"took longer than {culprit.seconds:g} s and was stopped")


def _without(batches: Batches | deque[Sequence[RewardCall]], rows: tuple[int, ...]) -> Batches:
    """Batches less the calls for these rows."""
    kept = [[call for call in batch if call.rows != rows] for batch in batches]
    return [batch for batch in kept if batch]
