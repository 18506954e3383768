"""The training loop. There is no other.

``max_lag: 0`` is on-policy; ``max_lag: k`` overlaps sampling with training. The code is the same: the overlap comes
from the feed's tasks, which go on while this coroutine awaits the compute thread.

    consumes:      groups from the feed, in order of admission
    waits for:     the feed (rollouts, or a broker), the compute thread (forward, backward, optimizer), the sync (engine
                   at rest)
    is unblocked:  by the feed's workers as they finish groups; slots are free once nothing is sampled by older weights
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tandem import machine
from tandem.errors import SyncError, TandemError
from tandem.metrics import Max, Mean, Sum, Value, merge
from tandem.model.policy import Policy
from tandem.observability import trace
from tandem.observability.emit import Telemetry
from tandem.observability.watchdog import deadline_in
from tandem.rollout.cursor import Cursor
from tandem.rollout.rate import Pace
from tandem.rollout.supply import Supply
from tandem.trainer.checkpoint import Checkpoints
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.state import TrainerState
from tandem.trainer.step import Step, StepStats
from tandem.types import Group, Json
from tandem.weight_sync.base import Handoff, Link, Published

T = TypeVar("T")

NUM_RECENT = 4
"""Rollouts of a step about which an engine is asked where its proof is in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The live parts of one run, as ``run.py`` put them together."""

    steps: int
    """Optimizer steps of the whole run."""
    policy: Policy
    """What is trained."""
    link: Link
    """The way that weights travel, bound to policy and engine."""
    feed: Supply
    """Groups, in order."""
    pack: Packer
    """Groups to micro-batches."""
    step: Step
    """Gradient and update."""
    checkpoints: Checkpoints
    """What survives."""
    evaluate: Callable[[int], Awaitable[None]]
    """Looks at held-out tasks if this step is due."""
    evaluates: Callable[[int], bool]
    """Whether it is."""
    telemetry: Telemetry
    """Where numbers go."""
    records: Callable[[int, StepBatch, StepStats], Iterable[Mapping[str, Json]]]
    """Rollout records of a step, for people, each made when it is asked for."""
    show: Callable[[int, Sequence[Group]], None]
    """Told each step's groups, for people to see some of their answers."""
    stop: asyncio.Event
    """Set to end after what is under way, with everything saved."""
    reached: Callable[[int], None]
    """Told each step that training has reached."""
    grading: Callable[[], Mapping[str, Value]]
    """What the graders counted since the last call."""
    pace: Pace
    """How far sampling is ahead, and who waits for whom."""


async def train(run: Run, state: TrainerState) -> TrainerState:
    """Train from ``state`` to the last step, or until stopped; the state that was reached, always saved."""
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(run.link.open(state.version))
        # Before anything is played: a resumed run may have this evaluation behind it, and its first groups must not
        # be sampled in other company than theirs for that.
        await _unless_stopped(run, run.evaluate(state.step))
        feed = await _unless_stopped(run, stack.enter_async_context(run.feed.open(state.cursor)))
        if feed is None:  # it waited for a broker
            await run.checkpoints.save(state)
            return state
        writing = _Writing(run)
        stack.push_async_callback(writing.done)
        while state.step < run.steps and not run.stop.is_set():
            begun = time.perf_counter()
            with trace.span("seconds/wait"), run.pace.waiting():
                groups = await _taken(run, feed, state)
            if groups is None:
                break
            await link.rest()
            with trace.span("seconds/pack"):
                batch = run.pack(groups, version=state.step)
            step = state.step + 1
            # Sampling goes on while this step is written down and saved, but for what is evaluated on the same engine.
            goes_on = step < run.steps and not run.evaluates(step)
            early = _Early(run, link, feed, groups, step if goes_on else None)
            stats = await run.step.forward_backward(batch, early)
            async with _commit(run, link, state, batch, groups, early.cursor or feed.cursor()) as handoff:
                run.reached(step)
                # Before the state that is saved: a resumed run goes on as far ahead as this one would have.
                paced = run.pace.step(step, stats.metrics)
                parts, cursor = [paced, feed.metrics(), run.grading()], early.cursor or feed.cursor()
                if goes_on and early.cursor is None:
                    # What is asked while the engine stands still waits there, all of it, and gets the new weights.
                    handoff.when_still(partial(feed.release, groups))
                parts.append(await run.step.apply(step, batch, stats))
            assert handoff.published is not None
            parts.append(handoff.metrics())
            state = state.advanced(batch.num_loss_tokens, handoff.published.version, cursor, run.pace.state)
            await writing.begin(step, batch, stats)
            _emit(run, state, batch, stats, parts, begun, handoff.published)
            run.checkpoints.still()
            run.show(step, groups)
            if run.checkpoints.due(step):
                await writing.done()  # a run that goes on from here has the rollouts of all steps before
                if await run.checkpoints.save(state):
                    await feed.saved(state.cursor)
            if not goes_on:
                await _unless_stopped(run, run.evaluate(state.step))
                feed.release(groups)
        if run.stop.is_set():
            # What was played since the last step is kept too.
            state = dataclasses.replace(state, cursor=feed.cursor())
            await writing.done()
            if await run.checkpoints.save(state):
                await feed.saved(state.cursor)
    return state


@asynccontextmanager
async def _commit(
    run: Run, link: Link, state: TrainerState, batch: StepBatch, groups: Sequence[Group], cursor: Cursor
) -> AsyncIterator[Handoff]:
    """Publish what the block makes of the policy; where that is not proven, save it: it is the engine that failed.

    Raises:
        SyncError: and what to do.
    """
    handoff, step = Handoff(), state.step + 1
    try:
        async with link.commit(step, last=step == run.steps, recent=_texts(groups)) as handoff:
            yield handoff
    except SyncError as error:
        if (version := handoff.unproven) is None or run.checkpoints.contents != "all":
            raise
        if not await run.policy.compute(link.trained.finite):
            error.args = (f"{error}. The policy itself holds NaN or infinities: it is not saved",)
            raise
        await run.checkpoints.save(state.advanced(batch.num_loss_tokens, version, cursor, run.pace.state))
        folder = run.checkpoints.folder.parent
        said = f"{error}. Step {step} is saved. To go on, with engines started anew and proven: tandem train {folder}"
        error.args = (f"{said}; to see where tokens differ, and why: tandem mismatch {folder}",)
        raise


def _texts(groups: Sequence[Group]) -> list[list[int]]:
    """Prompt and answer of one rollout each of a few groups."""
    turns = [rollout.turns[-1] for group in groups for rollout in group.rollouts[:1] if rollout.turns]
    return [[*turn.prompt, *turn.completion.tokens] for turn in turns[:NUM_RECENT]]


class _Early:
    """Asks for the groups of the next step while the device is still busy with this one; they wait for its policy."""

    def __init__(self, run: Run, link: Link, feed: Supply, groups: Sequence[Group], step: int | None):
        self._run, self._link, self._feed, self._groups, self._step = run, link, feed, groups, step
        self.cursor: Cursor | None = None
        """Where the feed stood before; None while nothing was asked."""

    def __call__(self) -> None:
        if self._step is not None and self._run.pace.on_policy and self._link.ahead(self._step):
            self.cursor = self._feed.cursor()
            self._feed.release(self._groups)


class _Writing:
    """Writes rollouts down on a thread, one step at a time, while the next one is sampled: they have many tokens."""

    def __init__(self, run: Run):
        self._run = run
        self._task: asyncio.Future[None] | None = None

    async def begin(self, step: int, batch: StepBatch, stats: StepStats) -> None:
        """A step's, once those of the step before are written."""
        await self.done()
        self._task = asyncio.ensure_future(asyncio.to_thread(self._write, step, batch, stats))

    async def done(self) -> None:
        """Wait until nothing is being written."""
        task, self._task = self._task, None
        if task is not None:
            with trace.span("seconds/record"):
                await task

    def _write(self, step: int, batch: StepBatch, stats: StepStats) -> None:
        self._run.telemetry.rollouts(step, self._run.records(step, batch, stats))


def _emit(
    run: Run,
    state: TrainerState,
    batch: StepBatch,
    stats: StepStats,
    parts: Iterable[Mapping[str, Value]],
    begun: float,
    published: Published,
) -> None:
    """Write one step's numbers down."""
    if published.moved:
        run.telemetry.event(
            "published",
            step=state.step,
            digest=published.version.digest,
            seconds=published.seconds,
            bytes=published.bytes,
            probe_gap=published.probe_gap,
        )
    seconds = time.perf_counter() - begun
    merged = merge([stats.metrics, batch.metrics, *parts])
    sampled = merged.get("tokens/generated", Sum(0.0))
    whole: dict[str, Value] = {
        "seconds/step": Sum(seconds),
        "tokens_per_second": Mean(sampled.value if isinstance(sampled, Sum) else 0.0, seconds),
        "memory/rss_gb": Max(machine.resident() / 1e9),
    }
    if (held := machine.held(str(run.policy.device))) is not None:
        whole["memory/gpu_gb"] = Max(held / 1e9)
    if (kept := machine.reserved(str(run.policy.device))) is not None:
        whole["memory/gpu_reserved_gb"] = Max(kept / 1e9)
    run.telemetry.emit(state.step, [merged, whole, trace.take()])


async def _taken(run: Run, feed: Supply, state: TrainerState) -> list[Group] | None:
    """The next batch; None if the run is to stop. A run that gets none any more is saved: nothing else is under way."""
    try:
        return await _unless_stopped(run, feed.take())
    except TandemError as error:
        late = deadline_in(error)
        if late is None or late.on != "compute thread":  # which would have to save it
            with contextlib.suppress(TandemError):  # the first error is the one to tell
                await run.checkpoints.save(dataclasses.replace(state, cursor=feed.cursor()))
        raise


async def _unless_stopped(run: Run, work: Awaitable[T]) -> T | None:
    """Await ``work``, or give it up and return None as soon as the run is to stop."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(run.stop.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
