"""Grading in processes of its own, so that a reward which hangs or crashes costs one rollout and not the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tandem.errors import RewardError
from tandem.metrics import Sum, Value
from tandem.rewards._grader import Failure, Verdicts
from tandem.rewards._process import Call, Died, Worker
from tandem.rewards.base import Reward
from tandem.types import Rollout

logger = logging.getLogger(__name__)

AnyReward = Reward | Callable[..., Any] | str
"""A reward, a plain function, or the import path of one."""


@dataclass(slots=True)
class _Slot:
    """A place for a worker; empty after its worker died, until the next group needs one."""

    worker: Worker | None = None


@dataclass(slots=True)
class _Marks:
    """What one rollout got so far."""

    rewards: dict[str, float | None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Graders:
    """Rewards in worker processes: ``async with Graders(...) as graders: await graders.grade(rollouts)``."""

    def __init__(
        self,
        specs: Mapping[str, tuple[AnyReward, float]],
        *,
        workers: int = 1,
        timeout: float = 10.0,
        log: Path | None = None,
    ) -> None:
        """Nothing starts yet.

        Args:
            specs: Rewards and their weights by name.
            workers: Processes; each grades one group at a time.
            timeout: Seconds that one reward may take for one rollout; a function of a whole group gets that
                much for each of its rollouts.
            log: File for what graders print and for their tracebacks; None: our own stderr.

        Raises:
            RewardError: a reward cannot be sent to another process.
        """
        self._weights = {name: weight for name, (_, weight) in specs.items()}
        self._full_marks = {n: r.full_marks if isinstance(r, Reward) else None for n, (r, _) in specs.items()}
        self._specs = pickle.dumps([(name, *_packed(name, reward)) for name, (reward, _) in specs.items()])
        self._timeout = timeout
        self._log = log
        self._slots = [_Slot() for _ in range(max(1, workers))]
        self._free: asyncio.Queue[_Slot] = asyncio.Queue()
        self._takes_groups: dict[str, bool] = {}
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._told: set[tuple[str, str]] = set()

    @property
    def full_marks(self) -> Mapping[str, float | None]:
        """What a gold reply earns from each reward; None where it proves nothing or is not known."""
        return self._full_marks

    async def open(self) -> None:
        """Start all workers at once and wait until they are ready.

        Raises:
            RewardError: a reward cannot be imported, or a process does not start.
        """
        started = await asyncio.gather(*(self._fill(slot) for slot in self._slots), return_exceptions=True)
        failed = [outcome for outcome in started if isinstance(outcome, BaseException)]
        if failed:
            await self.close()
            raise failed[0]
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def close(self) -> None:
        """End all workers."""
        living = [slot.worker for slot in self._slots if slot.worker is not None]
        for slot in self._slots:
            slot.worker = None
        await asyncio.gather(*(worker.close() for worker in living))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The siblings of one task with rewards, weighted sum and status; failed ones pass through.

        A reward that raises, hangs, crashes its process or returns no finite number makes its rollout an error;
        one that returns None leaves its rollout out of the group.

        Raises:
            RewardError: a worker had to be replaced and the new one does not start.
        """
        rows = tuple(row for row, rollout in enumerate(rollouts) if rollout.status == "ok")
        if not rows:
            return list(rollouts)
        since = time.perf_counter()
        marks = {row: _Marks() for row in rows}
        packed = pickle.dumps(tuple(rollouts))
        async with self._borrowed() as slot:
            outcomes = await self._judged(slot, packed, self._plan(rows))
            for call in [call for call, got in outcomes.items() if len(call.rows) > 1 and isinstance(got, Failure)]:
                outcomes |= await self._isolated(slot, packed, call, outcomes.pop(call))
        for call, verdicts in outcomes.items():
            self._mark(marks, call, verdicts)
        self._seconds += time.perf_counter() - since
        return [self._graded(rollout, marks[row]) if row in marks else rollout for row, rollout in enumerate(rollouts)]

    def metrics(self) -> dict[str, Value]:
        """Counts since the last call: failed rollouts by reason, processes replaced, seconds spent grading."""
        values: dict[str, Value] = {f"grading/{name}": Sum(float(count)) for name, count in self._counts.items()}
        values["seconds/grading"] = Sum(self._seconds)
        self._counts.clear()
        self._seconds = 0.0
        return values

    def _plan(self, rows: tuple[int, ...]) -> list[Call]:
        """All calls for a group: one per rollout and reward, and one per reward that takes the group whole."""
        alone = [name for name in self._weights if not self._takes_groups[name]]
        together = [name for name in self._weights if self._takes_groups[name]]
        return [Call(name, (row,)) for row in rows for name in alone] + [Call(name, rows) for name in together]

    @contextlib.asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[_Slot]:
        slot = await self._free.get()
        try:
            yield slot
        except BaseException:
            if slot.worker is not None:  # it may still be busy with what nobody waits for any more
                await slot.worker.kill()
                slot.worker = None
            raise
        finally:
            self._free.put_nowait(slot)

    async def _fill(self, slot: _Slot) -> Worker:
        """The slot's worker, started if need be."""
        if slot.worker is None or not slot.worker.alive:
            slot.worker, self._takes_groups = await Worker.start(self._specs, self._log)
        return slot.worker

    async def _judged(self, slot: _Slot, rollouts: bytes, calls: Sequence[Call]) -> dict[Call, Verdicts]:
        """Make the calls. One that kills its worker fails, and the others go on in a new worker.

        The other rewards of a rollout that killed a worker are skipped: it is lost already.
        """
        outcomes: dict[Call, Verdicts] = {}
        waiting = deque(calls)
        while waiting:
            worker = await self._fill(slot)
            try:
                await worker.submit(rollouts, waiting, self._timeout)
                while waiting:
                    verdicts = await worker.answer(self._timeout * len(waiting[0].rows))
                    outcomes[waiting.popleft()] = verdicts
            except Died as death:
                slot.worker = None
                self._counts["restarts"] += 1
                culprit = waiting.popleft()
                outcomes[culprit] = death.failure
                if len(culprit.rows) == 1:
                    waiting = deque(call for call in waiting if call.rows != culprit.rows)
        return outcomes

    async def _isolated(self, slot: _Slot, rollouts: bytes, call: Call, failed: Verdicts) -> dict[Call, Verdicts]:
        """Outcomes of a group call that failed: each rollout alone shows the culprits, the others go again together."""
        alone = await self._judged(slot, rollouts, [Call(call.name, (row,)) for row in call.rows])
        culprits = {one: got for one, got in alone.items() if isinstance(got, Failure) or isinstance(got[0], Failure)}
        if not culprits:
            return {call: failed}
        rest = tuple(row for row in call.rows if Call(call.name, (row,)) not in culprits)
        return culprits | (await self._judged(slot, rollouts, [Call(call.name, rest)]) if rest else {})

    def _mark(self, marks: Mapping[int, _Marks], call: Call, verdicts: Verdicts) -> None:
        each = [verdicts] * len(call.rows) if isinstance(verdicts, Failure) else verdicts
        for row, verdict in zip(call.rows, each, strict=True):
            if not isinstance(verdict, Failure):
                marks[row].rewards[call.name] = verdict
                continue
            text = f"reward {call.name!r} {verdict.text}"
            if not marks[row].failures:
                self._counts[f"failed_{verdict.reason}"] += 1
            marks[row].failures.append(text)
            first = (call.name, verdict.reason) not in self._told
            self._told.add((call.name, verdict.reason))
            where = f"; tracebacks are in {self._log}" if self._log else ""
            logger.log(logging.WARNING if first else logging.DEBUG, "%s; its rollout is left out%s", text, where)

    def _graded(self, rollout: Rollout, marks: _Marks) -> Rollout:
        given = {name: value for name, value in marks.rewards.items() if value is not None}
        given = {name: given[name] for name in self._weights if name in given}
        if marks.failures:
            return replace(rollout, status="error", error="; ".join(marks.failures), rewards=given, reward=None)
        complete = len(given) == len(self._weights)
        total = sum(self._weights[name] * value for name, value in given.items()) if complete else None
        return replace(rollout, rewards=given, reward=total)


def _packed(name: str, reward: AnyReward) -> tuple[str, str | bytes]:
    """What messages call a reward, and how it travels: an import path, or a pickle.

    Raises:
        RewardError: it cannot be pickled.
    """
    if isinstance(reward, str):
        return f"reward function {reward!r}", reward
    module, qualname = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", "")
    called = f"reward {name!r}" if isinstance(reward, Reward) else f"reward function '{module}:{qualname}'"
    remedy = "define it at the top level of a module that can be imported"
    if module == "__main__":
        raise RewardError(f"{called} cannot be sent to a grading process, which has another __main__; {remedy}")
    try:
        return called, pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RewardError(f"{called} cannot be sent to a grading process: {error}; {remedy}") from error
