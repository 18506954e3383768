"""Grading in worker processes: a reward that hangs or crashes costs one rollout and not the run."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from tandem.errors import RewardError
from tandem.metrics import Sum, Value
from tandem.rewards.base import Failure, Outcome, Reward
from tandem.rewards.function import Function
from tandem.rewards.grading.grader import Order, RewardCall
from tandem.rewards.grading.pool import Pool
from tandem.together import cancel, together
from tandem.types import Rollout

logger = logging.getLogger(__name__)

MOST_LOG = 16 << 20
"""Bytes of the log, of which the last half is kept when it grows beyond them."""

MOST_AT_ONCE = 8
"""Answers that a process is handed in one message."""


@dataclass(slots=True)
class _Marks:
    """What one rollout got so far."""

    rewards: dict[str, float | None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Graders:
    """Rewards in worker processes: ``async with Graders(...) as graders: await graders.grade(rollouts)``."""

    def __init__(
        self,
        specs: Mapping[str, tuple[Reward | str, float]],
        *,
        workers: int = 1,
        timeout: float = 10.0,
        log: Path | None = None,
        steps: int | None = None,
    ) -> None:
        """Nothing starts yet.

        Args:
            specs: Rewards, or import paths of functions, and their weights by name.
            workers: Processes; each grades an answer or a group at a time. A reward that is ``alone`` has its own.
            timeout: Seconds that one reward may take for one rollout; a function of a whole group gets that
                much for each of its rollouts.
            log: File for what graders print and for their tracebacks; None: our own stderr.
            steps: Of the run, for functions that ask for ``trainer_state``; None where that is not known.

        Raises:
            RewardError: a reward cannot be sent to another process.
        """
        self._weights = {name: weight for name, (_, weight) in specs.items()}
        rewards = {name: Function(path=r) if isinstance(r, str) else r for name, (r, _) in specs.items()}
        self.full_marks = {name: reward.full_marks for name, reward in rewards.items()}
        """What a gold reply earns from each reward; None where it proves nothing or is not known."""
        self.parts: Mapping[str, Reward] = rewards
        """The rewards by name."""
        self._log = log
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._warned: set[tuple[str, str]] = set()
        self._trimming: asyncio.Task[None] | None = None
        alone = [name for name, reward in rewards.items() if reward.alone]
        shared = [name for name in rewards if name not in alone]
        packed = {name: _packed(name, reward) for name, reward in rewards.items()}
        pool_names = [*([shared] if shared else []), *([name] for name in alone)]
        self._pools = [
            Pool(
                rewards={name: rewards[name] for name in names},
                order=Order({name: packed[name] for name in names}, steps),
                size=1 if names[0] in alone else max(1, workers),
                timeout=timeout,
                log=log,
                counts=self._counts,
            )
            for names in pool_names
        ]
        self._places = max((pool.size for pool in self._pools), default=1)
        self._waiting: deque[tuple[Rollout, asyncio.Future[Rollout]]] = deque()
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def singly(self) -> bool:
        """True if every answer can be graded as it ends: no reward needs its siblings, or awaits beside theirs."""
        return all(pool.singly for pool in self._pools)

    async def __aenter__(self) -> Self:
        """Start all workers at once and wait until they are ready.

        Raises:
            RewardError: a reward cannot be imported, or a process does not start.
        """
        try:
            await together([pool.open() for pool in self._pools])
            self._trimming = asyncio.create_task(self._trim())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        for _, graded in self._waiting:
            graded.cancel()
        self._waiting.clear()
        await cancel(*self._jobs)
        await asyncio.gather(*(pool.close() for pool in self._pools))

    async def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The siblings of one task with rewards, weighted sum and status; failed ones pass through.

        A reward that raises, hangs, crashes its process or returns no finite number makes its rollout an error. One
        that returns None says nothing of it: the sum is over the others. Without any, the rollout is left out of its
        group: it has no reward.

        Raises:
            RewardError: a worker had to be replaced and the new one does not start, or a reward asks for the run to
                end.
        """
        rows = tuple(row for row, rollout in enumerate(rollouts) if rollout.status == "ok")
        if not rows:
            return list(rollouts)
        since = time.perf_counter()
        marks = {row: _Marks() for row in rows}
        packed = pickle.dumps(tuple(rollouts), pickle.HIGHEST_PROTOCOL)
        groups = [rollout.id.rpartition("/")[0] for rollout in rollouts]
        for outcomes in await together([pool.grade(packed, rows, groups) for pool in self._pools]):
            for call, outcome in outcomes.items():
                self._mark(marks, call, outcome)
        self._seconds += time.perf_counter() - since
        return [self._graded(rollout, marks[row]) if row in marks else rollout for row, rollout in enumerate(rollouts)]

    async def grade_one(self, rollout: Rollout) -> Rollout:
        """An answer as ``grade`` returns it, where ``singly``.

        Answers that find no process free share its next message, whatever their groups: with one for each the event
        loop has half as much again to do (``benchmarks/host.py``).
        """
        graded: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._waiting.append((rollout, graded))
        self._hand_out()
        return await graded

    def _hand_out(self) -> None:
        """Begin a job for each free place, each with a half of its share, so that a slow answer delays few others."""
        while self._waiting and len(self._jobs) < self._places:
            share = min(MOST_AT_ONCE, -(-len(self._waiting) // (2 * self._places)))
            job = self._job([self._waiting.popleft() for _ in range(share)])
            # Of no answer's context, whose waits it would be counted as.
            self._jobs.add(asyncio.create_task(job, context=Context()))

    async def _job(self, entries: Sequence[tuple[Rollout, asyncio.Future[Rollout]]]) -> None:
        waiting = [(rollout, graded) for rollout, graded in entries if not graded.done()]  # the others' were cancelled
        try:
            rollouts = await self.grade([rollout for rollout, _ in waiting])
            for (_, graded), rollout in zip(waiting, rollouts, strict=True):
                if not graded.done():
                    graded.set_result(rollout)
        except Exception as error:
            for _, graded in waiting:
                if not graded.done():
                    graded.set_exception(error)
        finally:
            for _, graded in waiting:  # of a job that was cancelled
                graded.cancel()
            self._jobs -= {asyncio.current_task()}
            self._hand_out()

    def metrics(self) -> dict[str, Value]:
        """Counts since the last call: failed rollouts by reason, processes replaced, seconds spent grading."""
        values: dict[str, Value] = {f"grading/{name}": Sum(float(count)) for name, count in self._counts.items()}
        values["seconds/grading"] = Sum(self._seconds)
        self._counts.clear()
        self._seconds = 0.0
        return values

    async def _trim(self) -> None:
        """Keep the log below its bound: a reward that prints must not fill the disk."""
        while self._log is not None:
            await asyncio.sleep(1.0)
            if self._log.exists() and self._log.stat().st_size > MOST_LOG:
                with self._log.open("rb") as file:
                    file.seek(-MOST_LOG // 2, os.SEEK_END)
                    last = file.read(MOST_LOG // 2)
                os.truncate(self._log, 0)  # in place: workers have it open, and write at its end
                with self._log.open("ab") as file:
                    file.write(b"... what was here is gone: the log had grown too long\n" + last)

    def _mark(self, marks: Mapping[int, _Marks], call: RewardCall, outcome: Outcome) -> None:
        for at, verdict in enumerate(outcome.verdicts):
            mark = marks[call.rows[at]]
            mark.metrics |= outcome.metrics[at] if outcome.metrics else {}
            if not isinstance(verdict, Failure):
                mark.rewards[call.name] = verdict
                continue
            text = f"reward {call.name!r} {verdict.text}"
            if verdict.costs == "run":
                raise RewardError(text)
            if not mark.failures:
                self._counts[f"failed_{verdict.reason}"] += 1
            mark.failures.append(text)
            self._tell(call.name, verdict, text)

    def _tell(self, name: str, failure: Failure, text: str) -> None:
        """Log a failure; the first of its kind as a warning."""
        level = logging.DEBUG if (name, failure.reason) in self._warned else logging.WARNING
        self._warned.add((name, failure.reason))
        where = f"; tracebacks are in {self._log}" if self._log else ""
        logger.log(level, "%s; its rollout is left out%s", text, where)

    def _graded(self, rollout: Rollout, marks: _Marks) -> Rollout:
        rewards = {name: value for name in self._weights if (value := marks.rewards.get(name)) is not None}
        metrics = {**rollout.metrics, **marks.metrics}
        if marks.failures:
            error = "; ".join(marks.failures)
            return replace(rollout, status="error", error=error, rewards=rewards, reward=None, metrics=metrics)
        total = sum(self._weights[name] * value for name, value in rewards.items()) if rewards else None
        return replace(rollout, rewards=rewards, reward=total, metrics=metrics)


def _packed(name: str, reward: Reward) -> bytes:
    """A reward as it travels.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        if type(reward).__module__ == "__main__":
            raise pickle.PicklingError("that has another __main__")
        return pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        remedy = "define it at the top level of a module that can be imported"
        raise RewardError(f"reward {name!r} cannot be sent to a grading process: {error}; {remedy}") from error
