"""One setting of ``overlap.py``: Tandem's own loop with a stopwatch around its parts, and a trace of what a step waits
for that is neither sampling nor computing.

    python benchmarks/_overlap_run.py MODEL LINES.jsonl [--url http://...] [key=value ...]

Besides the parts of ``_versus_tandem.py`` each step's line has, in seconds: ``lock``, the longest wait for an asyncio
lock; ``poll``, the longest sleep of a coroutine; ``handed``, from the batch's last answer, or from asking for the batch
if that was later, until the trainer had it; ``loop``, the latest that the event loop came to a call that was due; and
``idle``, how long no group was being played. ``processor`` is the trainer's processor time.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from asyncio import locks
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _versus_tandem as tandem  # first: it keeps libraries from asking the network
from _versus import Parts, append, work_of

from tandem.config import loading as recipes
from tandem.metrics import flatten
from tandem.rollout.buffer import RolloutBuffer
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.lag_control import LagControl
from tandem.trainer import assemble as run

BEAT = 0.005
"""Seconds between two looks at the event loop."""


class Waits:
    """The longest of each kind since the last look."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self.where: dict[str, str] = {}
        self.ended: dict[int, float] = {}

    def seen(self, kind: str, seconds: float, where: str = "") -> None:
        """One wait; of the longest it is kept where it was."""
        if seconds >= self.longest.get(kind, 0.0):
            self.longest[kind] = seconds
            self.where[kind] = where

    def taken(self) -> Mapping[str, Mapping[str, Any]]:
        """Seconds and places by kind."""
        waits = {
            kind: {"seconds": seconds, "where": self.where.get(kind, "")} for kind, seconds in self.longest.items()
        }
        self.longest, self.where = {}, {}
        return waits

    def trace(self) -> None:
        """Time every lock, every sleep, and how groups are handed over."""
        acquire, sleep, take, group = asyncio.Lock.acquire, asyncio.sleep, RolloutBuffer.take, GroupRunner.run
        paced = LagControl.step

        async def timed_acquire(lock: asyncio.Lock) -> Any:
            begun = time.perf_counter()
            try:
                return await acquire(lock)
            finally:
                if _of_a_step():
                    self.seen("lock", time.perf_counter() - begun, _caller())

        async def timed_sleep(delay: float, *rest: Any) -> Any:
            begun = time.perf_counter()
            try:
                return await sleep(delay, *rest)
            finally:
                if delay > 0 and _of_a_step():
                    self.seen("poll", time.perf_counter() - begun, _caller())

        async def timed_group(worker: GroupRunner, *args: Any, index: int, **more: Any) -> Any:
            finished_group = await group(worker, *args, index=index, **more)
            self.ended[index] = time.perf_counter()
            return finished_group

        async def timed_take(buffer: RolloutBuffer) -> Any:
            begun = time.perf_counter()
            groups = await take(buffer)
            ready = max([begun, *(self.ended.pop(g.index, begun) for g in groups)])
            self.seen("handed", time.perf_counter() - ready)
            return groups

        def timed_pace(lag_control: LagControl, *args: Any) -> Any:
            metrics = paced(lag_control, *args)
            self.longest["idle"] = flatten(metrics).get("engine/idle_seconds", 0.0)
            return metrics

        changed: dict[tuple[Any, str], Any] = {
            (asyncio.Lock, "acquire"): timed_acquire,
            (asyncio, "sleep"): timed_sleep,
            (GroupRunner, "run"): timed_group,
            (RolloutBuffer, "take"): timed_take,
            (LagControl, "step"): timed_pace,
        }
        for (owner, name), value in changed.items():
            setattr(owner, name, value)

    def listen(self) -> None:
        """See how late the event loop is."""
        loop = asyncio.get_running_loop()

        def beat(due: float) -> None:
            now = time.perf_counter()
            self.seen("loop", now - due)
            loop.call_later(BEAT, beat, now + BEAT)

        beat(time.perf_counter())


def _of_a_step() -> bool:
    """Whether a step may wait for this: its own coroutines, not those with a name, which look after something."""
    task = asyncio.current_task()
    return task is not None and task.get_name().startswith(("Task-", "group "))


def _caller() -> str:
    """Where the coroutine that called a timed one is, and its task."""
    frame, task = sys._getframe(2), asyncio.current_task()
    while frame.f_back is not None and frame.f_code.co_filename == locks.__file__:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return place if task is None else f"{place} in {task.get_name()}"


class Traced(Parts):
    """Parts whose laps tell of waits too."""

    def __init__(self, file: Path, waits: Waits):
        super().__init__(file)
        self._waits = waits
        self._processor = time.process_time()

    def lap(self) -> None:
        before, self._processor = self._processor, time.process_time()
        self.note(waits=self._waits.taken(), processor=self._processor - before)
        super().lap()


def main() -> None:
    args = tandem.arguments(__doc__)
    waits = Waits()
    parts = Traced(args.lines, waits)
    with tempfile.TemporaryDirectory(prefix="overlap-run-") as runs:
        engine = {"urls": [args.url]} if args.url else args.engine
        recipe = tandem.options(work_of(args), args.model, engine, runs)
        loaded = recipes.from_options(recipe, args.overrides, Path("overlap"))
        append(args.lines, kind="about", overrides=args.overrides)
        waits.trace()
        tandem.instrument(parts, args.lines, work_of(args))

        async def go() -> None:
            waits.listen()
            await run.train(loaded.config, resume=None)

        asyncio.run(go())


if __name__ == "__main__":
    main()
