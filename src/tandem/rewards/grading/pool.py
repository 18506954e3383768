"""Pool of grading processes with the same rewards: each grades an answer or a group at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tandem.observability import waits
from tandem.rewards.base import Outcome, Reward
from tandem.rewards.grading.grader import Ability, Order, RewardCall
from tandem.rewards.grading.process import GradingProcess, WorkerDied
from tandem.together import together

RETRIES = 2
"""How often a call is made again when something else killed its process."""

_LATE = 1.0
"""Seconds that a process has to say that async calls of it passed their deadline, before it is killed."""

Outcomes = dict[RewardCall, Outcome]
"""Of the calls that were answered."""

Batches = deque[list[RewardCall]]
"""Calls in order; those of one batch are async and go on side by side."""


@dataclass(slots=True, kw_only=True)
class Pool:
    """Grading processes that share a set of rewards."""

    rewards: Mapping[str, Reward]
    """By name."""
    order: Order
    """What each process is told first."""
    size: int
    """Processes."""
    timeout: float
    """Seconds one reward may take for one rollout, where it does not say itself how long a call may."""
    log: Path | None
    """File for what rewards print; None: our own stderr."""
    counts: Counter[str]
    """Where processes that had to be replaced are counted, as restarts."""
    _workers: list[GradingProcess] = field(default_factory=list)
    # None stands for a worker that died: the next call starts another in its place.
    _free: asyncio.Queue[GradingProcess | None] = field(default_factory=asyncio.Queue)
    _abilities: dict[str, Ability] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    async def open(self) -> None:
        """Start all workers at once and wait until they are ready; raises as ``grade``."""
        for worker in await together([self._start() for _ in range(self.size)]):
            self._free.put_nowait(worker)

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @property
    def singly(self) -> bool:
        """True if no reward takes groups, nor goes on beside other calls."""
        return not any(ability.takes_groups or ability.is_async for ability in self._abilities.values())

    async def grade(self, rollouts: bytes, rows: tuple[int, ...], groups: Sequence[str]) -> Outcomes:
        """Every reward's outcomes for these rows: of one group, or where no reward takes groups of several.

        A call during which its worker dies fails, and the others go on in a new worker. Of several that were under way
        then, each is made again by itself. So is one whose worker was killed from elsewhere.

        Raises:
            RewardError: a worker had to be replaced and the new one does not start, or does not in time.
        """
        outcomes: Outcomes = {}
        batches, killed = self._batches(rows), Counter[RewardCall]()
        worker = await self._free_worker()
        try:
            while batches:
                if worker is None or not worker.alive:
                    worker = await self._start()
                try:
                    await self._collect(worker, rollouts, batches, outcomes, groups)
                except WorkerDied as death:
                    worker = None
                    self.counts["restarts"] += 1
                    batch = batches.popleft()
                    killed.update(batch if death.killed else ())
                    if len(batch) > 1 or (death.killed and killed[batch[0]] <= RETRIES):
                        batches.extendleft([call] for call in reversed(batch))
                    else:
                        outcomes[batch[0]] = Outcome([death.failure] * len(batch[0].rows))
        except BaseException:
            if worker is not None:  # it may still be busy with what nothing waits for any more
                await worker.kill()
                worker = None
            raise
        finally:
            self._free.put_nowait(worker)
        return outcomes

    async def _collect(
        self, worker: GradingProcess, rollouts: bytes, batches: Batches, outcomes: Outcomes, groups: Sequence[str]
    ) -> None:
        """Make the calls, and move each from its batch to the outcomes when it is answered; raises ``WorkerDied``."""
        worker.submit(rollouts, batches)
        while batches:
            batch = batches[0]
            seconds = max(call.seconds for call in batch)
            until = time.monotonic() + seconds + (_LATE if self._abilities[batch[0].name].is_async else 0.0)
            while batch:
                names = ", ".join(dict.fromkeys(call.name for call in batch))
                reason = f"reward {names} of group {groups[batch[0].rows[0]]}"
                number, outcome = await worker.read(tuple[int, Outcome], until, seconds, reason)
                call = next((call for call in batch if call.number == number), None)
                if call is None or {len(outcome.verdicts), len(outcome.metrics or call.rows)} != {len(call.rows)}:
                    raise await worker.broken()
                outcomes[call] = outcome
                batch.remove(call)
            batches.popleft()

    def _batches(self, rows: tuple[int, ...]) -> Batches:
        """All calls for a group, async ones together; one for each rollout, or for all where a reward takes groups."""
        groups = [name for name in self.rewards if self._abilities[name].takes_groups]
        calls = [self._call(name, (row,)) for row in rows for name in self.rewards if name not in groups]
        calls += [self._call(name, rows) for name in groups]
        together = [call for call in calls if self._abilities[call.name].is_async]
        singly = [[call] for call in calls if not self._abilities[call.name].is_async]
        return deque([together, *singly] if together else singly)

    def _call(self, name: str, rows: tuple[int, ...]) -> RewardCall:
        seconds = self.rewards[name].call_seconds
        return RewardCall(next(self._numbers), name, rows, self.timeout * len(rows) if seconds is None else seconds)

    async def _free_worker(self) -> GradingProcess | None:
        if not self._free.empty():
            return self._free.get_nowait()
        async with waits.waiting(waits.actor("grading"), "a free grading process", on="grading"):
            return await self._free.get()

    async def _start(self) -> GradingProcess:
        seconds = max(reward.start_seconds for reward in self.rewards.values())
        worker, self._abilities = await GradingProcess.start(self.order, seconds, self.log)
        self._workers = [*(other for other in self._workers if other.alive), worker]
        return worker
