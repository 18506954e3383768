"""Decides which task is played when, and hands out batches. Slots bound the lag by construction.

A task holds a slot from admission until its group was trained or dropped. The slots are the places of the next
``max_lag + 1`` batches, and the timetable says which stream each place belongs to. A stream's groups are trained in
order of admission, so a group is trained at most ``max_lag`` optimizer steps after its oldest token was sampled. A
group that is dropped leaves its place to the next task of its stream: every batch is mixed as the timetable says. A
flat group may leave it to one that was trained before (``replay.py``), whose age has a bound of its own.

With ``max_lag`` 0 tasks are admitted in waves: the next one starts when the last has been judged. What is sampled
together then depends on nothing but the state, which is what makes a resumed run equal the run it continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from tandem.algorithms.curricula.base import Curriculum
from tandem.config.sections import Replay, Reroll
from tandem.metrics import Histogram, Sum, Value, merge
from tandem.observability import progress, waits
from tandem.rollout._mixture import Mixture
from tandem.rollout.cursor import DataState, Draw
from tandem.rollout.draws import Draws
from tandem.rollout.entries import Entry, EntryState
from tandem.rollout.judges import Judge
from tandem.rollout.measure import measure
from tandem.rollout.rate import Pace
from tandem.rollout.replay import Store
from tandem.rollout.streams import Stream
from tandem.rollout.supply import Batch
from tandem.types import Group, Json, Sampling

log = logging.getLogger(__name__)

Happened = Callable[[str, Mapping[str, Json]], None]
"""Told by name what happened, and what is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOptions:
    """What the recipe says about feeding."""

    groups_per_step: int
    """Groups in a batch."""
    group_size: int
    """Siblings in a group."""
    max_lag: int
    """Most optimizer steps between the weights that sampled a token and those it trains."""
    behind: int = 0
    """How many of these steps the engine's weights may themselves be old when they sample."""
    drop_flat: bool
    """Replace groups whose rewards are all equal."""
    sampling: Sampling
    """How answers are sampled."""
    patience: int = 50
    """Batches' worth of a stream's groups dropped in a row before it is left out, or given up if no other is left."""
    steps: int = 0
    """Of the run."""
    max_resample_times: int | None = None
    """Batches' worth of flat groups that are replaced for one batch; then they are kept. None: as many as it takes."""
    replay: Replay = field(default_factory=Replay)
    """What may take the place of flat groups."""
    reroll: Reroll = field(default_factory=Reroll)
    """When tasks that nobody solved come again."""
    curriculum: Curriculum | None = None
    """How often each task is drawn; None: once in every epoch."""

    @property
    def ahead(self) -> int:
        """Steps by which sampling may be ahead of training."""
        return self.max_lag - self.behind


@dataclass(slots=True)
class RolloutBuffer:
    """Tasks in, batches of groups out. ``version`` is the policy step that training has reached."""

    streams: Sequence[Stream]
    """What there is to train on."""
    options: BufferOptions
    """How."""
    version: Callable[[], int]
    """Optimizer steps taken."""
    judge: Judge
    """Adjusts rewards before a group is judged."""
    on_drop: Callable[[str, Group], None]
    """Told of every dropped group and why: flat, stale or failed."""
    pace: Pace | None = None
    """How far sampling is ahead of training now; None: always as far as ``options`` allow."""
    happened: Happened = lambda name, told: None
    """Told when a group is replayed, a task is drawn again, or a flat group is kept."""
    _pace: Pace = field(init=False)
    _streams: dict[str, Stream] = field(init=False)
    _mixture: Mixture = field(init=False)
    _draws: Draws = field(init=False)
    _store: Store = field(init=False)
    _entries: list[Entry] = field(default_factory=list)
    _taken: int = 0
    _released: int = 0
    _admitted: int = 0
    _refilled: int = 0
    _dropped: Counter[str] = field(default_factory=Counter)
    _counts: Counter[str] = field(default_factory=Counter)
    _ages: list[float] = field(default_factory=list)
    _trained: Counter[str] = field(default_factory=Counter)
    _measured: list[Mapping[str, Value]] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._streams = {stream.name: stream for stream in self.streams}
        self._mixture = Mixture(self.streams, self.options.groups_per_step, self.options.patience)
        self._pace = self.pace or Pace.fixed(self.options.groups_per_step, self.options.ahead)
        asked = self.options
        self._draws = Draws(
            self.streams, steps=asked.steps, reroll=asked.reroll, curriculum=asked.curriculum, told=self._rerolled
        )
        self._store = Store(asked.replay)

    @asynccontextmanager
    async def open(self, data_state: DataState) -> AsyncIterator[RolloutBuffer]:
        """Start playing where ``data_state`` stands; whatever is in flight at the end is cancelled."""
        self._draws.open(data_state)
        self._store.fill(data_state.stored)
        self._admitted, self._refilled = data_state.admitted, data_state.refilled
        self._taken = self._released = data_state.taken
        self._entries = [Entry.restored(draw, group) for draw, group in data_state.ready]
        self._mixture.resting.update(data_state.resting)
        self._admit()
        try:
            yield self
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def take(self) -> Batch:
        """The next batch: of each stream the groups admitted first. They keep their slots until it is released.

        Raises:
            Starved: group after group was dropped, of every stream.
            EngineError: the engine failed.
        """
        with progress.under_way("sampling", total=self.options.groups_per_step, unit="groups") as shown:
            while True:
                self._raise_failure()
                self._drop_stale()
                first = self._first()
                if sum(entry.state is EntryState.READY for entry in first) == self.options.groups_per_step:
                    return self._handed_out(first)
                self._changed.clear()
                shown.reach(sum(not entry.in_flight for entry in first))
                pending = sum(entry.in_flight for entry in self._entries)
                async with waits.waiting("trainer", f"{pending} groups to be played", on="rollouts"):
                    await self._changed.wait()

    def _release(self, entries: Sequence[Entry]) -> None:
        """Free the slots of a batch that was trained, and admit what fits."""
        for entry in entries:
            entry.become(EntryState.TRAINED)
            self._over(entry)
            self._entries.remove(entry)
        self._released = self._taken
        self._admit()

    def data_state(self) -> DataState:
        """Where the buffer stands now. Groups being played are noted to be played again."""
        ready = [entry for entry in self._entries if entry.state is EntryState.READY]
        again = [entry for entry in self._entries if entry.in_flight or entry.state is EntryState.SCORED]
        drawn = self._draws.data_state()
        return replace(
            drawn,
            taken=self._taken,
            admitted=self._admitted,
            again=(*(entry.draw for entry in again), *drawn.again),
            ready=tuple((entry.draw, entry.group) for entry in ready),
            resting=dict(self._mixture.resting),
            stored=self._store.stored,
            refilled=self._refilled,
        )

    async def saved(self, data_state: DataState) -> None:
        """Nothing to do: the data state is all there is."""

    def metrics(self) -> Mapping[str, Value]:
        """What was taken or dropped since the last call, drops by reason, and what batches were made of."""
        counts, self._dropped = self._dropped, Counter()
        trained, self._trained = self._trained, Counter()
        measured, self._measured = self._measured, []
        drops = {f"groups/dropped_{reason}": Sum(float(counts[reason])) for reason in ("flat", "stale", "failed")}
        taken = {f"env/{name}/trained": Sum(float(trained[name])) for name in self._streams}
        return merge([*measured, drops, taken, self._reused()])

    def _reused(self) -> Mapping[str, Value]:
        """What took the place of others since the last call, of what the recipe asks for."""
        counts, self._counts = self._counts, Counter()
        ages, self._ages = self._ages, []
        asked = {
            "replayed": bool(self.options.replay.size),
            "rerolled": self.options.reroll.start_fraction < 1,
            "kept_flat": self.options.max_resample_times is not None,
        }
        told: dict[str, Value] = {f"groups/{name}": Sum(float(counts[name])) for name, on in asked.items() if on}
        return {**told, "replay/age": Histogram(tuple(ages))} if ages else told

    def _handed_out(self, entries: Sequence[Entry]) -> Batch:
        """A batch that is complete; its groups with signal may be trained again later."""
        for entry in entries:
            entry.become(EntryState.TAKEN)
            self._store.add(entry.draw, entry.group)
            self._measure(entry.draw, entry.group)
        groups = [entry.group for entry in entries]
        self._taken += 1
        self._refilled = 0
        self._draws.taken(self._taken)
        self._trained.update(entry.draw.stream for entry in entries)
        self._ages.extend(float(self.version() - group.version_min) for group in groups if group.replayed)
        return Batch(groups, self.data_state, partial(self._release, entries))

    def _first(self) -> list[Entry]:
        """What the next batch is made of, as far as it is admitted."""
        wanted = Counter(self._mixture.counts(self._taken))
        first = []
        for entry in self._entries:
            if entry.state is not EntryState.TAKEN and wanted[entry.draw.stream]:
                wanted[entry.draw.stream] -= 1
                first.append(entry)
        return first

    def _admit(self) -> None:
        """Give every free slot to a task of its stream."""
        if self._failure is not None or self._wave_is_out():
            return
        for stream, batch in self._free():
            entry = Entry(self._admitted, self._draws.next(stream, batch))
            self._admitted += 1
            self._entries.append(entry)
            task = asyncio.create_task(self._play(entry), name=f"group {entry.index}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _free(self) -> list[tuple[str, int]]:
        """Stream and batch of each free slot, in the order in which they will be trained on."""
        # Batches that were taken and are being trained hold all the slots that were theirs.
        held = Counter(entry.draw.stream for entry in self._entries if entry.state is not EntryState.TAKEN)
        free = []
        last = self._released + self._pace.lag
        for batch in range(self._taken, last + 1):
            # Of the last batch, only as many places as sampling may be ahead.
            short = self._pace.lag * self.options.groups_per_step - self._pace.ahead if batch == last else 0
            for stream in self._mixture.batch(batch)[: self.options.groups_per_step - short]:
                if held[stream]:
                    held[stream] -= 1
                else:
                    free.append((stream, batch))
        return free

    async def _play(self, entry: Entry) -> None:
        """Consumes: a task. Waits for: the engine and the graders. Unblocks: ``take``."""
        stream, options = self._streams[entry.draw.stream], self.options
        task, id = stream.of(entry.draw)
        entry.become(EntryState.RUNNING)
        try:
            with self._pace.playing():
                group = await stream.worker.group(
                    task, id=id, index=entry.index, size=options.group_size, sampling=options.sampling
                )
            entry.score(self.judge(group))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Not one rollout's fault: whoever takes the next batch is told.
            self._failure = self._failure or error
            self._changed.set()
            return
        if not self._wave_is_out():
            self._judge_all()
            self._admit()
        self._changed.set()

    def _wave_is_out(self) -> bool:
        """True while a wave of on-policy sampling has groups that are still being played."""
        return self._pace.ahead == 0 and any(entry.in_flight for entry in self._entries)

    def _judge_all(self) -> None:
        """See which groups can be trained on, and what becomes of the others."""
        for entry in list(self._entries):
            if entry.state is not EntryState.SCORED:
                continue
            self._draws.judged(entry.draw, entry.group)
            if len(entry.group.scored) < 2:
                self._drop("failed", entry)
            elif not entry.group.is_flat:
                self._keep(entry)
            elif not self._replayed(entry):
                self._flat(entry)

    def _keep(self, entry: Entry) -> None:
        entry.become(EntryState.READY)
        self._mixture.good(entry.draw.stream)

    def _flat(self, entry: Entry) -> None:
        """Drop a group without signal, unless enough were replaced for this batch."""
        most = self.options.max_resample_times
        if not self.options.drop_flat:
            self._keep(entry)
        elif most is None or self._refilled < most * self.options.groups_per_step:
            self._refilled += 1
            self._drop("flat", entry)
        else:
            self._keep(entry)
            self._counts["kept_flat"] += 1
            self.happened("flat_group_kept", {"group": entry.group.id, "resampled": self._refilled})

    def _replayed(self, entry: Entry) -> bool:
        """Whether a group that was trained before could take the place of one without signal."""
        waiting = {other.group.id for other in self._entries if not other.in_flight}
        # At the latest it is trained when all that sampling may be ahead by is used up.
        latest = self.version() + self.options.ahead
        found = self._store.take(entry.draw.stream, step=latest, taken=waiting)
        if found is None:
            return False
        flat = entry.group
        self._dismiss("flat", entry)
        draw, stored = found
        entry.replay(draw, stored)
        self._counts["replayed"] += 1
        age = self.version() - stored.version_min
        self.happened("group_replayed", {"group": stored.id, "times": stored.replayed, "age": age, "for": flat.id})
        return True

    def _rerolled(self, id: str) -> None:
        self._counts["rerolled"] += 1
        self.happened("group_rerolled", {"group": id})

    def _drop_stale(self) -> None:
        """A guard: slots bound the lag of what this buffer sampled, but a resumed or foreign group may be older."""
        for entry in list(self._entries):
            if entry.state is not EntryState.READY:
                continue
            most = self.options.replay.max_age if entry.group.replayed else self.options.max_lag
            if self.version() - entry.group.version_min > most:
                if not entry.group.replayed:
                    self._draws.repeat(entry.draw)
                self._drop("stale", entry)
        self._admit()

    def _drop(self, reason: str, entry: Entry) -> None:
        entry.become(EntryState.DROPPED)
        self._entries.remove(entry)
        self._dismiss(reason, entry)

    def _dismiss(self, reason: str, entry: Entry) -> None:
        """A group is not trained on, whatever becomes of its place."""
        group = entry.group
        self._dropped[reason] += 1
        self._measure(entry.draw, group)
        self.on_drop(reason, group)
        self._over(entry)
        starved = self._mixture.dropped(entry.draw.stream, reason, group, self._taken)
        self._failure = self._failure or starved

    def _measure(self, draw: Draw, group: Group) -> None:
        """Count a group once: with the step that takes or drops it, for however long it waited."""
        if not group.replayed:
            self._measured.append(measure([group], self._streams[draw.stream].solved))

    def _over(self, entry: Entry) -> None:
        """An entry's group was trained or dropped."""
        if not entry.group.replayed:  # of one that is replayed this was so before
            self._draws.over(entry.draw)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
