"""The training loop, the only one.

``max_lag: 0`` is on-policy; ``max_lag: k`` overlaps sampling with training. The code is the same: the overlap comes
from the rollout buffer's tasks, which go on while this coroutine awaits the compute thread.

    take -> pack -> forward, backward -> commit [ optimizer, publish ] -> write down -> ( save )
                          |                 |
                          +-- free_slots --+    one of both, as the weight sync decides: the next groups are requested

    consumes:      batches of groups from the buffer, in order of admission
    waits for:     the buffer (rollouts, or a broker), the compute thread (forward, backward, optimizer), the weight
                   sync (engine paused)
    is unblocked:  by the buffer's tasks as they score groups; a batch frees its slots once nothing requested then is
                   sampled by older weights
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
from tandem.errors import SyncError, TandemError, command
from tandem.metrics import Max, Mean, Sum, Value, merge
from tandem.model.policy import Policy
from tandem.observability import trace
from tandem.observability.emit import Telemetry
from tandem.observability.watchdog import deadline_in
from tandem.rollout.source import Batch, RolloutSource
from tandem.together import unless
from tandem.trainer.checkpoint import Checkpoints
from tandem.trainer.evaluate import Evaluator
from tandem.trainer.pack import Packer, StepBatch
from tandem.trainer.state import TrainerState
from tandem.trainer.step import Step, StepStats
from tandem.types import Group, Json
from tandem.weight_sync.transaction.session import Commit, Published, WeightSyncSession

T = TypeVar("T")

NUM_RECENT = 4
"""Rollouts of a step that are scored on the engine where its verification is in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The live parts of one run, as ``assemble.py`` puts them together."""

    steps: int
    """Optimizer steps of the whole run."""
    policy: Policy
    """The model that is trained."""
    weight_sync: WeightSyncSession
    """Publishes the policy's weights to the engine; bound to both."""
    source: RolloutSource
    """Batches of groups, in order of admission."""
    pack: Packer
    """Groups to micro-batches."""
    step: Step
    """Gradient and update."""
    checkpoints: Checkpoints
    """Saves the trainer state."""
    evaluator: Evaluator
    """Held-out tasks, and the steps at which they are evaluated."""
    telemetry: Telemetry
    """Metrics, events and rollout records."""
    records: Callable[[int, StepBatch, StepStats], Iterable[Mapping[str, Json]]]
    """Rollout records of a step, each made on iteration."""
    show: Callable[[int, Sequence[Group], Mapping[str, float]], None]
    """Prints some answers of each step's groups."""
    stop: asyncio.Event
    """Set to end the run in order, with everything saved."""
    reached: Callable[[int], None]
    """Called with each step that training has reached; lag is measured from it."""
    grading: Callable[[], Mapping[str, Value]]
    """Metrics of the graders since the last call."""
    on_policy: bool
    """No answer is sampled while a step is trained."""


async def train(run: RunParts, state: TrainerState) -> TrainerState:
    """Train from ``state`` to the last step, or until stopped; the state that was reached, always saved."""
    async with AsyncExitStack() as stack:
        weight_sync = await stack.enter_async_context(run.weight_sync.open(state.version))
        # Evaluate before the buffer opens, so a resumed run batches the same requests as the original.
        await _unless_stopped(run, run.evaluator.maybe(state.step))
        buffer = await _unless_stopped(run, stack.enter_async_context(run.source.open(state.data_state)))
        if buffer is None:  # it waited for a broker
            await run.checkpoints.save(state)
            return state
        rollouts = _RolloutWriter(run)
        stack.push_async_exit(run.checkpoints.end)
        stack.push_async_callback(rollouts.done)
        while state.step < run.steps and not run.stop.is_set():
            begun, step = time.perf_counter(), state.step + 1
            batch = await _next_batch(run, buffer, state)
            if batch is None:
                break
            # What is evaluated has the engine to itself: then the next groups are requested after it.
            evaluates = step == run.steps or run.evaluator.wants(step)
            free_slots = None if evaluates else batch.free_slots
            await weight_sync.sleep()
            pack = run.pack.supervising() if batch.supervised else run.pack
            packed = await run.step.packed(pack, batch.groups, state.step)
            stats = await run.step.forward_backward(packed, partial(_request_early, run, weight_sync, step, free_slots))
            run.reached(step)
            metrics = [buffer.metrics(), run.grading()]
            async with _commit(run, weight_sync, state, batch, packed, free_slots) as commit:
                metrics.append(await run.step.apply(step, packed, stats))
            published = commit.published
            assert published is not None
            metrics.append(commit.metrics())
            state = state.advanced(packed.num_loss_tokens, published.version, batch.data_state)
            await rollouts.begin(step, packed, stats)
            _emit(run, state, packed, stats, metrics, begun, published)
            await run.checkpoints.check()
            run.show(step, batch.groups, packed.advantages)
            if run.checkpoints.due(step):
                await _save(run, buffer, rollouts, state)
            if evaluates:
                await _unless_stopped(run, run.evaluator.maybe(state.step))
                batch.free_slots()
        if run.stop.is_set():
            # What was sampled since the last step is kept too.
            state = dataclasses.replace(state, data_state=buffer.data_state())
            await _save(run, buffer, rollouts, state)
    return state


def _request_early(
    run: RunParts, weight_sync: WeightSyncSession, step: int, free_slots: Callable[[], None] | None
) -> None:
    """On policy, have the next requests wait at the engine for this step's weights while the device computes them."""
    if free_slots is not None and run.on_policy:
        weight_sync.accept_requests_for(step, free_slots)


async def _save(run: RunParts, buffer: RolloutSource, rollouts: _RolloutWriter, state: TrainerState) -> None:
    """Begin a checkpoint once the rollouts of all steps before it are written; it notifies their source in the end."""
    await rollouts.done()
    await run.checkpoints.begin(state, partial(buffer.saved, state.data_state))


@asynccontextmanager
async def _commit(
    run: RunParts,
    weight_sync: WeightSyncSession,
    state: TrainerState,
    batch: Batch,
    packed: StepBatch,
    free_slots: Callable[[], None] | None,
) -> AsyncIterator[Commit]:
    """Publish the policy that the block makes; where verification fails, save it first, since the engine is at fault.

    Raises:
        SyncError: with what to do.
    """
    commit, step = Commit(), state.step + 1
    try:
        async with weight_sync.commit(
            step, free_slots=free_slots, last=step == run.steps, recent=_recent(batch.groups)
        ) as commit:
            yield commit
    except SyncError as error:
        if (version := commit.unverified) is None or run.checkpoints.contents != "all":
            raise
        if not await weight_sync.trained.finite():
            error.args = (f"{error}. The policy itself holds NaN or infinities: it is not saved",)
            raise
        await run.checkpoints.save(state.advanced(packed.num_loss_tokens, version, batch.data_state))
        folder = run.checkpoints.folder.parent
        again = f"To go on, with engines started anew and proven: {command('train', folder)}"
        seen = f"to see where tokens differ, and why: {command('mismatch', folder)}"
        error.args = (f"{error}. Step {step} is saved. {again}; {seen}",)
        raise


def _recent(groups: Sequence[Group]) -> list[list[int]]:
    """Token ids of one rollout, prompt included, of each of a few groups."""
    turns = [rollout.turns[-1] for group in groups for rollout in group.rollouts[:1] if rollout.turns]
    return [[*turn.prompt, *turn.completion.tokens] for turn in turns[:NUM_RECENT]]


class _RolloutWriter:
    """Writes a step's rollouts to disk on a thread, while the next step is sampled."""

    def __init__(self, run: RunParts):
        self._run = run
        self._task: asyncio.Future[None] | None = None

    async def begin(self, step: int, batch: StepBatch, stats: StepStats) -> None:
        """Write a step's rollouts, once those of the step before are written."""
        await self.done()
        records = self._run.records(step, batch, stats)
        self._task = asyncio.ensure_future(asyncio.to_thread(self._run.telemetry.rollouts, step, records))

    async def done(self) -> None:
        """Wait until nothing is being written."""
        task, self._task = self._task, None
        if task is not None:
            with trace.span("seconds/record"):
                await task


def _emit(
    run: RunParts,
    state: TrainerState,
    batch: StepBatch,
    stats: StepStats,
    parts: Iterable[Mapping[str, Value]],
    begun: float,
    published: Published,
) -> None:
    """Write one step's metrics."""
    if published.moved:
        run.telemetry.event(
            "published",
            step=state.step,
            digest=published.version.digest,
            seconds=published.seconds,
            bytes=published.bytes,
            probe_gap=published.probe_gap,
            probe_alone=published.probe_alone,
        )
    seconds = time.perf_counter() - begun
    merged = merge([stats.metrics, batch.metrics, *parts])
    sampled = merged.get("tokens/trained" if batch.supervised else "tokens/generated", Sum(0.0))
    whole: dict[str, Value] = {
        "seconds/step": Sum(seconds),
        "tokens_per_second": Mean(sampled.value if isinstance(sampled, Sum) else 0.0, seconds),
        "memory/rss_gb": Max(machine.resident() / 1e9),
    }
    for name, size in machine.peaks(str(run.policy.device)).items():
        whole[f"memory/{name}"] = Max(size / 1e9)
    run.telemetry.emit(state.step, [merged, whole, trace.take()])


async def _next_batch(run: RunParts, buffer: RolloutSource, state: TrainerState) -> Batch | None:
    """The next batch; None if the run is to stop. A run that gets none any more is saved: nothing else is under way."""
    try:
        with trace.span("seconds/wait"):
            return await _unless_stopped(run, buffer.take())
    except TandemError as error:
        late = deadline_in(error)
        if late is None or late.on != "compute thread":  # which would have to save it
            with contextlib.suppress(TandemError):  # the first error is the one to tell
                await run.checkpoints.save(dataclasses.replace(state, data_state=buffer.data_state()))
        raise


async def _unless_stopped(run: RunParts, work: Awaitable[T]) -> T | None:
    """Await ``work``, or give it up and return None as soon as the run is to stop."""
    stop = asyncio.ensure_future(run.stop.wait())
    try:
        return await unless(stop, work)
    finally:
        stop.cancel()
