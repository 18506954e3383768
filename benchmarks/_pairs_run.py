"""One setting of ``pairs.py``: Tandem's own loop on one rank or more, with a stopwatch around the lead's parts.

    python benchmarks/_pairs_run.py MODEL LINES.jsonl --runs FOLDER [--engine JSON] [key=value ...]

A run that an earlier setting has left in FOLDER is gone on with, by as many ranks as the recipe says: engines that
it left running are found by their records. It ends after its last step as if killed: nothing is saved, and its engines
run on, which ``pairs.py`` ends. Besides the parts of ``_versus_tandem.py`` each step's line has, in
seconds: ``paused``, in which the engine that waited longest sampled nothing, and ``held``, whether it did so for the
optimizer, too; ``publish``, from pause to resume without the optimizer, and ``calls``, what the lead waited for in it;
``update``, the optimizer on the lead's compute thread; and ``gather``, of that what passed until all ranks had all
weights.
"""

from __future__ import annotations

import _versus_tandem as tandem  # first: it keeps libraries from asking the network

# isort: split
import asyncio
import contextlib
import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _versus import Parts, append, synchronize, timed_calls, work_of

from tandem.config import loading as recipes
from tandem.distributed.group import DataGroup
from tandem.distributed.shared_slices import SharedSlices, TrainedSlices
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.trainer import assemble as run
from tandem.trainer.step import Step
from tandem.trainer.work import LocalWork
from tandem.weight_sync.transaction.session import WeightSyncSession
from tandem.weight_sync.transaction.trained import Trained

NAME = "pairs"
"""Of the run's folder."""
CALLS: dict[tuple[Any, str], str] = {
    **{(owner, "checksums"): "sums here" for owner in (Trained, TrainedSlices)},
    **{(owner, "scores"): "scores here" for owner in (Trained, TrainedSlices)},
    (SharedSlices, "transfer"): "slices written",
    (VllmEngine, "pause"): "pause",
    (VllmEngine, "checksums"): "sums there",
    (VllmEngine, "probe"): "probe",
    (VllmEngine, "set_version"): "stamp",
    (VllmEngine, "resume"): "resume",
}
"""What a publish waits for."""


class Publishes:
    """How long engines stand still for each publish, and of what; and what engine and trainer hold."""

    def __init__(self, parts: Parts, last: int):
        self._parts, self._last = parts, last
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: dict[str, float] = {}
        self._engine: Any = None
        self._held = False

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        synchronize()
        begin = time.perf_counter()
        yield
        synchronize()
        self._seconds[name] += time.perf_counter() - begin

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a step's; after the last, end this process: saving the states would take longer than all steps."""
        paused, publish = (float(metrics.get(name, 0.0)) for name in ("engine/paused_seconds", "seconds/sync"))
        update, gather = self._seconds["update"], self._seconds["gather"]
        self._parts.note(
            paused=paused, held=self._held, publish=publish, update=update, gather=gather, calls=dict(self._calls)
        )
        self._seconds.clear()
        self._calls.clear()
        if step == self._last:
            sys.stdout.flush()
            os._exit(0)

    def watch(self) -> None:
        """Time the update and its gather, and note memory once weights are shared and once all is under way."""
        apply, gather = LocalWork.apply, DataGroup.all_gather
        bind, train = WeightSyncSession.bind, Step.forward_backward

        def timed_apply(work: LocalWork, *args: Any) -> Any:
            with self._timed("update"):
                return apply(work, *args)

        def timed_gather(group: DataGroup, *args: Any) -> None:
            with self._timed("gather"):
                gather(group, *args)

        async def watched_bind(session: WeightSyncSession, **how: Any) -> None:
            await bind(session, **how)
            self._engine, self._held = session.engine, session.sync.pause == "step"
            append(self._parts.file, kind="about", own_gb=await session.policy.compute(_own_gb))

        async def watched_train(step: Step, *args: Any) -> Any:
            if self._parts.laps == self._last - 2:  # the last lap is not measured
                infos = await asyncio.gather(*(server.info() for server in self._engine.servers))
                peaks = [round(worker.peak_bytes / 1e9, 2) for info in infos for worker in info.workers]
                append(self._parts.file, kind="about", engines_gb=peaks)
            return await train(step, *args)

        changed: dict[tuple[Any, str], Any] = {
            (LocalWork, "apply"): timed_apply,
            (DataGroup, "all_gather"): timed_gather,
            (WeightSyncSession, "bind"): watched_bind,
            (Step, "forward_backward"): watched_train,
        }
        called = {
            (owner, name): timed_calls(self._calls, what, getattr(owner, name)) for (owner, name), what in CALLS.items()
        }
        for (owner, name), value in {**changed, **called}.items():
            setattr(owner, name, value)


def _own_gb() -> float | None:
    """What this process holds of the card by itself: weights that are an engine's do not count. None without a card."""
    if not torch.cuda.is_available():
        return None
    gc.collect()
    return torch.cuda.memory_allocated() / 1e9


def main() -> None:
    parser = tandem.parser_of(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run's folder")
    args = parser.parse_intermixed_args()
    work, parts, folder = work_of(args), Parts(args.lines), args.runs / NAME
    recipe = {**tandem.options(work, args.model, args.engine, str(args.runs)), "name": NAME}
    loaded = recipes.from_options(recipe, args.overrides, Path("pairs"))
    append(args.lines, kind="about", overrides=args.overrides, rollouts=work.groups * work.siblings)
    tandem.instrument(parts, args.lines, work)
    publishes = Publishes(parts, work.steps + 1)
    publishes.watch()
    resume = folder if folder.exists() else None
    asyncio.run(run.train(loaded.config, resume=resume, on_step=publishes.on_step))


if __name__ == "__main__":
    main()
