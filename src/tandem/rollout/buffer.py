"""Rollout buffer: decides which task is sampled when, and forms batches. Slots bound the lag by construction.

A task holds a slot from admission until its group was trained or dropped. The slots are the places of the next
``max_lag + 1`` batches, and the mixture says which environment each place belongs to. An environment's groups are
trained in order of admission, so a group is trained at most ``max_lag`` optimizer steps after its oldest token was
sampled. A group that is dropped leaves its place to the next task of its environment: every batch is mixed as the
mixture says. A zero-variance group may leave it to one that was trained before (``replay.py``), whose age has a bound
of its own.

With ``max_lag`` 0 tasks are admitted in waves: the next one starts when the last has been scored. What is sampled
together then depends on nothing but the state, which is what makes a resumed run equal the run it continues. A wave is
as large as it takes to fill the batch (``oversampling.py``). The groups admitted first are trained, however long their
answers took, and the tasks of surplus groups are played again in the next wave.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from tandem.config.loading import RunConfig
from tandem.metrics import Value
from tandem.observability import progress, waits
from tandem.rollout.buffer_metrics import BufferMetrics
from tandem.rollout.mixture import EnvMixture
from tandem.rollout.oversampling import MOST, Oversample, SignalForecast
from tandem.rollout.replay import ReplayBuffer
from tandem.rollout.source import Batch, DataState, Draw
from tandem.rollout.task_sampler import EnvRunner, TaskSampler
from tandem.together import cancel
from tandem.types import Group, Json

log = logging.getLogger(__name__)

OnEvent = Callable[[str, Mapping[str, Json]], None]
"""Called with an event's name and fields."""


class EntryState(Enum):
    """State of an admitted task, from its admission until it was trained or dropped."""

    RUNNING = "running"
    """Admitted: it holds a slot, and its rollouts are sampled and graded."""
    SCORED = "scored"
    """Every rollout has its reward; on policy it waits here until its whole wave is scored."""
    READY = "ready"
    """Accepted: it waits for its place in a batch."""
    TAKEN = "taken"
    """In the batch that is trained."""
    TRAINED = "trained"
    """Trained; its slot is free."""
    DROPPED = "dropped"
    """Not trained: failed, zero-variance, stale or surplus; its slot is free."""


TRANSITIONS: Mapping[EntryState, frozenset[EntryState]] = {
    EntryState.RUNNING: frozenset({EntryState.SCORED, EntryState.DROPPED}),
    EntryState.SCORED: frozenset({EntryState.READY, EntryState.DROPPED}),
    EntryState.READY: frozenset({EntryState.TAKEN, EntryState.DROPPED}),
    EntryState.TAKEN: frozenset({EntryState.TRAINED}),
    EntryState.TRAINED: frozenset(),
    EntryState.DROPPED: frozenset(),
}
"""Transitions: the states that may follow each state. A resumed run's entries begin as RUNNING or READY."""


@dataclass(slots=True, eq=False)
class Entry:
    """An admitted task, its state, and its group once it is scored."""

    index: int
    """Its place in the order of admission."""
    draw: Draw
    state: EntryState = EntryState.RUNNING
    _group: Group | None = None
    task: asyncio.Task[None] | None = None
    """Plays it, where it is played here."""

    @property
    def in_flight(self) -> bool:
        """Its rollouts are not scored yet."""
        return self.state is EntryState.RUNNING

    @property
    def group(self) -> Group:
        """Its rollouts with their rewards; only once they are scored."""
        assert self._group is not None
        return self._group

    def score(self, group: Group) -> None:
        """Its rollouts have their rewards."""
        self.become(EntryState.SCORED)
        self._group = group

    def replay(self, draw: Draw, stored: Group) -> None:
        """A group that was trained before takes the place of its own."""
        self.become(EntryState.READY)
        self.draw, self._group = draw, replace(stored, index=self.index)

    def become(self, state: EntryState) -> None:
        """Go on to a state.

        Raises:
            RuntimeError: none that may follow its own.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"entry {self.index} is {self.state.value} and cannot become {state.value}")
        self.state = state


@dataclass
class RolloutBuffer:
    """Rollout buffer: admits tasks, has their groups sampled, and forms batches in the order of admission.

    Task order, environments, replay, metrics and lag are classes of their own. The rest stays in one class, because an
    entry's state, the counts of batches taken and freed, and the free slots that follow from both change together,
    within one turn of the event loop.
    """

    runners: Sequence[EnvRunner]
    """The environments to train on."""
    config: RunConfig
    """Group size, groups per step, lag, sampling and drops."""
    version: Callable[[], int]
    """Optimizer steps taken."""
    on_drop: Callable[[str, Group], None]
    """Called with a dropped group and why: zero_variance, stale or failed; surplus ones are only counted."""
    on_event: OnEvent = lambda name, fields: None
    """Called when a group is replayed, a task is drawn again, or a zero-variance group is kept."""
    max_dropped_batches: int = 50
    """Batches' worth of an environment's groups dropped in a row before it is left out, or the run ends if no other is
    left."""
    _entries: list[Entry] = field(default_factory=list)
    _taken: int = 0
    _freed: int = 0
    _admitted: int = 0
    _indices: dict[Draw, int] = field(default_factory=dict)  # of draws that a checkpoint had in flight
    _refilled: int = 0
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _until_look: int = 1  # groups to be played before a batch may be complete, or the console is told
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        config = self.config
        # Sampling may be so many steps ahead of training; the engine's weights may be behind by the rest of the lag.
        self.ahead = config.max_lag - config.sync.behind
        self._drops_zero_variance = config.zero_variance_groups == "drop" and config.teacher is None
        self._oversample: Oversample = config.oversample if self._drops_zero_variance else "off"
        self._by_name = {runner.name: runner for runner in self.runners}
        self._mixture = EnvMixture(self.runners, config.groups_per_step, self.max_dropped_batches)
        self._sampler = TaskSampler(self.runners, config.steps, config.reroll, config.curriculum, self._rerolled)
        self._replay = ReplayBuffer(config.replay)
        self._forecast = SignalForecast(self._oversample)
        self._metrics = BufferMetrics(self._by_name)

    @asynccontextmanager
    async def open(self, data_state: DataState) -> AsyncIterator[RolloutBuffer]:
        """Start playing where ``data_state`` stands; whatever is in flight at the end is cancelled."""
        self._sampler.open(data_state)
        self._replay.stored = list(data_state.stored)
        self._forecast.counts.update(data_state.signal)
        self._admitted, self._refilled = data_state.admitted, data_state.refilled
        known = zip(data_state.again, data_state.again_indices, strict=False)  # older checkpoints have no indices
        self._indices = {draw: index for draw, index in known if index >= 0}
        self._taken = self._freed = data_state.taken
        self._entries = [Entry(group.index, draw, EntryState.READY, group) for draw, group in data_state.ready]
        self._mixture.resting.update(data_state.resting)
        self._admit()
        try:
            yield self
        finally:
            await cancel(*self._running)

    async def take(self) -> Batch:
        """The next batch: of each environment the groups admitted first. They keep their slots until it frees them.

        Raises:
            Starved: group after group was dropped, of every environment.
            EngineError: the engine failed.
        """
        with progress.under_way("sampling", total=self.config.groups_per_step, unit="groups") as shown:
            while True:
                if self._failure is not None:
                    raise self._failure
                self._drop_stale()
                first = self._first()
                if sum(entry.state is EntryState.READY for entry in first) == self.config.groups_per_step:
                    return self._handed_out(first)
                self._changed.clear()
                played = sum(not entry.in_flight for entry in first)
                shown.reach(played)
                pending = sum(entry.in_flight for entry in self._entries)
                self._until_look = 1 + (len(first) - played) // 8
                async with waits.waiting("trainer", f"{pending} groups to be played", on="rollouts"):
                    await self._changed.wait()

    def _free_slots(self, entries: Sequence[Entry]) -> None:
        """Free the slots of a batch that was trained, and admit what fits."""
        for entry in entries:
            entry.become(EntryState.TRAINED)
            self._finish(entry)
            self._entries.remove(entry)
        self._freed = self._taken
        self._admit()

    def data_state(self) -> DataState:
        """Where the buffer stands now. Groups being played are noted to be played again."""
        ready = [entry for entry in self._entries if entry.state is EntryState.READY]
        again = [entry for entry in self._entries if entry.in_flight or entry.state is EntryState.SCORED]
        drawn = self._sampler.data_state()
        return replace(
            drawn,
            taken=self._taken,
            admitted=self._admitted,
            again=(*(entry.draw for entry in again), *drawn.again),
            again_indices=(*(e.index for e in again), *(self._indices.get(draw, -1) for draw in drawn.again)),
            ready=tuple((entry.draw, entry.group) for entry in ready),
            resting=dict(self._mixture.resting),
            stored=tuple(self._replay.stored),
            refilled=self._refilled,
            signal=dict(self._forecast.counts),
        )

    async def saved(self, data_state: DataState) -> None:
        """Nothing to do: nothing is kept beside the data state."""

    def metrics(self) -> Mapping[str, Value]:
        """Metrics since the last call: groups taken and dropped, drops by reason, and reuse."""
        return self._metrics.collect()

    def _handed_out(self, entries: Sequence[Entry]) -> Batch:
        """A batch that is complete; its groups with signal may be trained again later."""
        if self.ahead == 0:  # in the next batch surplus groups would be off-policy
            if self._oversample == "keep":
                entries = [entry for entry in self._entries if entry.state is EntryState.READY]
            for entry in [e for e in self._entries if e.state is EntryState.READY and e not in entries]:
                self._drop_surplus(entry)
        for entry in entries:
            entry.become(EntryState.TAKEN)
            self._replay.add(entry.draw, entry.group)
            self._metrics.count(entry.draw, entry.group)
        groups = [entry.group for entry in entries]
        self._taken += 1
        self._refilled = 0
        self._sampler.taken(self._taken)
        self._metrics.trained.update(entry.draw.env for entry in entries)
        self._metrics.ages.extend(float(self.version() - group.version_min) for group in groups if group.replayed)
        return Batch(groups, self.data_state, partial(self._free_slots, entries))

    def _first(self) -> list[Entry]:
        """Entries of the next batch, as far as they are admitted."""
        wanted = Counter(self._mixture.counts(self._taken))
        first = []
        for entry in self._entries:
            if entry.state is not EntryState.TAKEN and wanted[entry.draw.env]:
                wanted[entry.draw.env] -= 1
                first.append(entry)
        return first

    def _admit(self) -> None:
        """Give every free slot to a task of its environment."""
        if self._failure is not None or self._wave_is_out():
            return
        for env, batch in self._free():
            draw = self._sampler.next(env, batch)
            index = self._indices.pop(draw, self._admitted)
            self._admitted = max(self._admitted, index + 1)
            entry = Entry(index, draw)
            self._entries.append(entry)
            entry.task = asyncio.create_task(self._play(entry), name=f"group {entry.index}")
            self._running.add(entry.task)
            entry.task.add_done_callback(self._running.discard)

    def _free(self) -> list[tuple[str, int]]:
        """Environment and batch of each free slot, in the order in which they will be trained on."""
        # Batches that were taken and are being trained hold all the slots that were theirs.
        in_play = Counter(entry.draw.env for entry in self._entries if entry.state is not EntryState.TAKEN)
        slots: list[tuple[str, int]] = []
        last = self._freed + self.ahead
        for batch in range(self._taken, last + 1):
            slots += [(env, batch) for env in self._mixture.batch(batch)]
        slots += [(env, last) for env in self._oversampled(Counter(env for env, _ in slots))]
        free = []
        for env, batch in slots:
            if in_play[env]:
                in_play[env] -= 1
            else:
                free.append((env, batch))
        return free

    def _oversampled(self, places: Mapping[str, int]) -> list[str]:
        """Environments of the groups in flight beyond an environment's places, since some will have no signal."""
        ready = Counter(entry.draw.env for entry in self._entries if entry.state is EntryState.READY)
        on_policy, extra = self.ahead == 0, list[str]()
        for env, count in places.items():
            wanted = count - ready[env]
            groups = self._forecast.groups(env, wanted, most=MOST * count, on_policy=on_policy)
            extra += [env] * (groups - max(0, wanted))
        times = self.config.max_resample_times
        return extra if times is None else extra[: max(0, times * self.config.groups_per_step - self._refilled)]

    async def _play(self, entry: Entry) -> None:
        """Consumes: a task. Waits for: the engine and the graders. Unblocks: ``take``."""
        runner, config, played = self._by_name[entry.draw.env], self.config, False
        try:
            task, id = runner.of(entry.draw)
            with self._metrics.playing():
                group = await runner.group_runner.run(
                    task, id=id, index=entry.index, size=config.group_size, sampling=config.sampling
                )
            entry.score(group)
            if self.config.on_policy_tail == "abort" and self.ahead == 0:
                self._cut_tail()
            if played := not self._wave_is_out():
                self._sort_scored()
                self._admit()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Not one rollout's fault: ``take`` raises it.
            self._failure = self._failure or error
        self._until_look -= 1
        if self._until_look <= 0 or self._failure is not None or (self.ahead == 0 and played):
            self._changed.set()

    def _wave_is_out(self) -> bool:
        """True while a wave of on-policy sampling has groups that are still being played."""
        return self.ahead == 0 and any(entry.in_flight for entry in reversed(self._entries))  # mostly the last ones

    def _cut_tail(self) -> None:
        """End a wave whose first groups fill the batch, whatever became of the others.

        Those are neither noted nor counted as scored, or it would matter how many of them were by now.
        """
        wanted, over = Counter(self._mixture.counts(self._taken)), []
        for entry in self._entries:
            if not wanted[entry.draw.env]:
                over.append(entry)
            elif entry.in_flight:
                return
            elif entry.state is EntryState.READY or (
                len(entry.group.scored) > 1 and not (entry.group.zero_variance and self._drops_zero_variance)
            ):
                wanted[entry.draw.env] -= 1
        if not wanted.total():
            for entry in over:
                self._drop_surplus(entry)

    def _sort_scored(self) -> None:
        """Sort scored groups: keep those with signal, replace or drop the others."""
        for entry in list(self._entries):
            if entry.state is not EntryState.SCORED:
                continue
            self._sampler.scored(entry.draw, entry.group)
            failed, signal = len(entry.group.scored) < 2, not entry.group.zero_variance
            if failed:
                self._drop("failed", entry)
            elif signal:
                self._keep(entry)
            elif not self._replace(entry):
                self._zero_variance(entry)
            self._forecast.note(entry.draw.env, not failed and (signal or entry.group.replayed > 0))

    def _keep(self, entry: Entry) -> None:
        entry.become(EntryState.READY)
        self._mixture.good(entry.draw.env)

    def _zero_variance(self, entry: Entry) -> None:
        """Drop a group without signal, unless enough were replaced for this batch."""
        most = self.config.max_resample_times
        if not self._drops_zero_variance:
            self._keep(entry)
        elif most is None or self._refilled < most * self.config.groups_per_step:
            self._refilled += 1
            self._drop("zero_variance", entry)
        else:
            self._keep(entry)
            self._metrics.reused["kept_zero_variance"] += 1
            self.on_event("zero_variance_group_kept", {"group": entry.group.id, "resampled": self._refilled})

    def _replace(self, entry: Entry) -> bool:
        """Replace a group without signal by one that was trained before; False if there is none."""
        if not self._replay.stored:
            return False
        waiting = {other.group.id for other in self._entries if not other.in_flight}
        # At the latest it is trained when all that sampling may be ahead by is used up.
        latest = self.version() + self.ahead
        replayed = self._replay.take(entry.draw.env, step=latest, taken=waiting)
        if replayed is None:
            return False
        replaced = entry.group
        self._report_drop("zero_variance", entry)
        draw, stored = replayed
        entry.replay(draw, stored)
        self._metrics.reused["replayed"] += 1
        age = self.version() - stored.version_min
        self.on_event("group_replayed", {"group": stored.id, "times": stored.replayed, "age": age, "for": replaced.id})
        return True

    def _rerolled(self, id: str) -> None:
        self._metrics.reused["rerolled"] += 1
        self.on_event("group_rerolled", {"group": id})

    def _drop_stale(self) -> None:
        """A guard: slots bound the lag of what this buffer sampled, but a resumed group may be older."""
        for entry in list(self._entries):
            if entry.state is not EntryState.READY:
                continue
            most = self.config.replay.max_age if entry.group.replayed else self.config.max_lag
            if self.version() - entry.group.version_min > most:
                if not entry.group.replayed:
                    self._sampler.repeat(entry.draw)
                self._drop("stale", entry)
        self._admit()

    def _drop_surplus(self, entry: Entry) -> None:
        """Have the task of a group that the batch has no place for played again; its requests are aborted."""
        group = None if entry.in_flight else entry.group
        if group is None and entry.task is not None:
            entry.task.cancel()
        self._metrics.drop("surplus", entry.draw, group)
        if group is None or not group.replayed:
            self._sampler.repeat(entry.draw)
            self._sampler.over(entry.draw)
        entry.become(EntryState.DROPPED)
        self._entries.remove(entry)

    def _drop(self, reason: str, entry: Entry) -> None:
        entry.become(EntryState.DROPPED)
        self._entries.remove(entry)
        self._report_drop(reason, entry)

    def _report_drop(self, reason: str, entry: Entry) -> None:
        """Count and report a group that is not trained on, whatever becomes of its slot."""
        group = entry.group
        self._metrics.drop(reason, entry.draw, group)
        self.on_drop(reason, group)
        self._finish(entry)
        starved = self._mixture.dropped(entry.draw.env, reason, group, self._taken)
        self._failure = self._failure or starved

    def _finish(self, entry: Entry) -> None:
        """An entry's group was trained or dropped."""
        if not entry.group.replayed:  # of one that is replayed this was so before
            self._sampler.over(entry.draw)
