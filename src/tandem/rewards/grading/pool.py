"""Pool of grading processes with the same rewards: each grades one group at a time, and is replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.observability import waits
from tandem.rewards.base import Reward
from tandem.rewards.grading.calls import Outcome
from tandem.rewards.grading.grader import Ability, Answer, Order, RewardCall
from tandem.rewards.grading.process import Died, GradingProcess

RETRIES = 2
"""How often a call is made again when something else killed its process."""

_LATE = 1.0
"""Seconds that a process has to say that async calls of it passed their deadline, before it is killed."""

Batches = deque[list[RewardCall]]
"""Calls in order; those of one batch are async and go on side by side."""

AnyReward = Reward | Callable[..., Any] | str
"""A reward, a plain function, or the import path of one."""


@dataclass(slots=True)
class _WorkerPlace:
    """A place for a worker; empty after its worker died, until the next call needs one."""

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
            log: File for what rewards print; None: our own stderr.
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
        self._numbers = itertools.count()

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

        A call during which its worker dies fails, and the others go on in a new worker. Of several that were under way
        then, each is made again by itself. So is one whose worker was killed from elsewhere.

        Raises:
            RewardError: a worker had to be replaced and the new one does not start, or does not in time.
        """
        outcomes: dict[RewardCall, Outcome] = {}
        batches, killed = self._batches(rows), Counter[RewardCall]()
        async with self._free_place() as place:
            while batches:
                try:
                    await self._collect(place, rollouts, batches, outcomes, group)
                except Died as death:
                    place.worker = None
                    self._counts["restarts"] += 1
                    batch = batches.popleft()
                    killed.update(batch if death.killed else ())
                    if len(batch) > 1 or (death.killed and killed[batch[0]] <= RETRIES):
                        batches.extendleft([call] for call in reversed(batch))
                    else:
                        outcomes[batch[0]] = Outcome([death.failure] * len(batch[0].rows))
        return outcomes

    async def _collect(
        self, place: _WorkerPlace, rollouts: bytes, batches: Batches, outcomes: dict[RewardCall, Outcome], group: str
    ) -> None:
        """Make the calls, and move each from its batch to the outcomes when it is answered; raises ``Died``."""
        worker = await self._fill(place)
        worker.submit(rollouts, batches)
        while batches:
            batch = batches[0]
            seconds = max(call.seconds for call in batch)
            until = time.monotonic() + seconds + (_LATE if self._abilities[batch[0].name].is_async else 0.0)
            while batch:
                names = ", ".join(dict.fromkeys(call.name for call in batch))
                answer = await worker.read(Answer, until, seconds, f"reward {names} of group {group}")
                call = next((call for call in batch if call.number == answer.call), None)
                if call is None or {len(answer.verdicts), len(answer.metrics or call.rows)} != {len(call.rows)}:
                    raise await worker.broken()
                outcomes[call] = Outcome(answer.verdicts, answer.metrics)
                batch.remove(call)
            batches.popleft()

    def _batches(self, rows: tuple[int, ...]) -> Batches:
        """All calls for a group, async ones together; one for each rollout, or for all where a reward takes groups."""
        groups = [name for name in self._names if self._abilities[name].takes_groups]
        calls = [self._call(name, (row,)) for row in rows for name in self._names if name not in groups]
        calls += [self._call(name, rows) for name in groups]
        together = [call for call in calls if self._abilities[call.name].is_async]
        singly = [[call] for call in calls if not self._abilities[call.name].is_async]
        return deque([together, *singly] if together else singly)

    def _call(self, name: str, rows: tuple[int, ...]) -> RewardCall:
        seconds = self._own_seconds.get(name, self._timeout * len(rows))
        return RewardCall(next(self._numbers), name, rows, seconds)

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
