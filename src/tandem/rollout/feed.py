"""Decides which task is played when, and hands out batches. Slots bound the lag by construction.

A task holds a slot from admission until its group was trained or dropped. The slots are the places of the next
``max_lag + 1`` batches, and the timetable says which stream each place belongs to. A stream's groups are trained in
order of admission, so a group is trained at most ``max_lag`` optimizer steps after its oldest token was sampled. A
group that is dropped leaves its place to the next task of its stream: every batch is mixed as the timetable says.

With ``max_lag`` 0 tasks are admitted in waves: the next one starts when the last has been judged. What is sampled
together then depends on nothing but the state, which is what makes a resumed run equal the run it continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from tandem import waits
from tandem.metrics import Sum, Value, merge
from tandem.rollout._mixture import Mixture
from tandem.rollout.measure import measure
from tandem.rollout.streams import Stream
from tandem.types import Group, Json, Sampling

log = logging.getLogger(__name__)

Judge = Callable[[Group], Group]
"""Last word on a group's rewards before it is judged flat (truncation penalties, for instance)."""


class Draw(NamedTuple):
    """A task of a stream, by its place in the stream's shuffled epochs."""

    stream: str
    """The stream's name."""
    number: int
    """Tasks of the stream drawn before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where the feed stands: all of it that a resume needs."""

    taken: int = 0
    """Batches handed out so far."""
    drawn: Mapping[str, int] = field(default_factory=dict)
    """Tasks drawn so far from the shuffled epochs of each stream, by its name."""
    admitted: int = 0
    """Groups admitted so far, repeats of stale ones included."""
    again: tuple[Draw, ...] = ()
    """Draws that were admitted but neither trained nor judged: they are played first, in this order."""
    ready: tuple[tuple[Draw, Group], ...] = ()
    """Groups judged and not yet trained, each with its draw."""
    resting: Mapping[str, int] = field(default_factory=dict)
    """Streams that are left out since they gave nothing to train on, each with the batch that tries it again."""
    batches: tuple[str, ...] = ()
    """A broker's batches whose groups were trained or dropped, or are in ``ready``, and that it was not told of."""


class Supply(Protocol):
    """Where the training loop's groups come from: played here (``Feed``) or elsewhere (``foreign.BrokerFeed``)."""

    def open(self, cursor: Cursor) -> AbstractAsyncContextManager[Supply]:
        """Go on where ``cursor`` stands."""
        ...

    async def take(self) -> list[Group]:
        """The groups of one optimizer step; they count as trained in every later ``cursor``."""
        ...

    def release(self, groups: Sequence[Group]) -> None:
        """The step that took these groups is over."""
        ...

    def cursor(self) -> Cursor:
        """Where it stands now."""
        ...

    async def saved(self, cursor: Cursor) -> None:
        """A checkpoint that holds ``cursor`` is on disk: what it remembers need not be given again."""
        ...

    def metrics(self) -> Mapping[str, Value]:
        """What arrived since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
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

    @property
    def ahead(self) -> int:
        """Steps by which sampling may be ahead of training."""
        return self.max_lag - self.behind


@dataclass(slots=True)
class _Entry:
    """One admitted task."""

    index: int
    draw: Draw
    group: Group | None = None
    judged: bool = False
    taken: bool = False


@dataclass(slots=True)
class Feed:
    """Tasks in, batches of groups out. ``version`` tells the policy step that training has reached."""

    streams: Sequence[Stream]
    """What there is to train on."""
    options: FeedOptions
    """How."""
    version: Callable[[], int]
    """Optimizer steps taken."""
    judge: Judge
    """Adjusts rewards before a group is judged."""
    on_drop: Callable[[str, Group], None]
    """Told of every dropped group and why: flat, stale or failed."""
    _streams: dict[str, Stream] = field(init=False)
    _mixture: Mixture = field(init=False)
    _entries: list[_Entry] = field(default_factory=list)
    _again: list[Draw] = field(default_factory=list)
    _drawn: Counter[str] = field(default_factory=Counter)
    _taken: int = 0
    _released: int = 0
    _admitted: int = 0
    _dropped: Counter[str] = field(default_factory=Counter)
    _trained: Counter[str] = field(default_factory=Counter)
    _measured: list[Mapping[str, Value]] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._streams = {stream.name: stream for stream in self.streams}
        self._mixture = Mixture(self.streams, self.options.groups_per_step, self.options.patience)

    @asynccontextmanager
    async def open(self, cursor: Cursor) -> AsyncIterator[Feed]:
        """Start playing where ``cursor`` stands; whatever is in flight at the end is cancelled."""
        self._drawn, self._admitted, self._again = Counter(cursor.drawn), cursor.admitted, list(cursor.again)
        self._taken = self._released = cursor.taken
        self._entries = [_Entry(group.index, draw, group, judged=True) for draw, group in cursor.ready]
        self._mixture.resting.update(cursor.resting)
        self._admit()
        try:
            yield self
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def take(self) -> list[Group]:
        """The next batch: of each stream the groups admitted first. They keep their slots until ``release``.

        Raises:
            Starved: group after group was dropped, of every stream.
            EngineError: the engine failed.
        """
        while True:
            self._raise_failure()
            self._drop_stale()
            first = self._first()
            if len(first) == self.options.groups_per_step and all(entry.judged for entry in first):
                for entry in first:
                    entry.taken = True
                self._taken += 1
                self._trained.update(entry.draw.stream for entry in first)
                return [entry.group for entry in first if entry.group is not None]
            self._changed.clear()
            pending = sum(entry.group is None for entry in self._entries)
            async with waits.waiting("trainer", "needs rollouts to train on", on=f"{pending} groups being played"):
                await self._changed.wait()

    def release(self, groups: Sequence[Group]) -> None:
        """Free the slots of a batch that was trained, and admit what fits."""
        done = {group.index for group in groups}
        self._entries = [entry for entry in self._entries if entry.index not in done]
        self._released = self._taken
        self._admit()

    def cursor(self) -> Cursor:
        """Where the feed stands now. Groups being played are noted to be played again."""
        waiting = [entry for entry in self._entries if not entry.taken]
        return Cursor(
            taken=self._taken,
            drawn=dict(self._drawn),
            admitted=self._admitted,
            again=(*(entry.draw for entry in waiting if not entry.judged), *self._again),
            ready=tuple((entry.draw, entry.group) for entry in waiting if entry.judged and entry.group is not None),
            resting=dict(self._mixture.resting),
        )

    async def saved(self, cursor: Cursor) -> None:
        """Nobody else need know: the cursor is all there is."""

    def metrics(self) -> Mapping[str, Value]:
        """What was played since the last call, trained or dropped, drops by reason, and what batches were made of."""
        counts, self._dropped = self._dropped, Counter()
        trained, self._trained = self._trained, Counter()
        measured, self._measured = self._measured, []
        drops = {f"groups/dropped_{reason}": Sum(float(counts[reason])) for reason in ("flat", "stale", "failed")}
        taken = {f"env/{name}/trained": Sum(float(trained[name])) for name in self._streams}
        return merge([*measured, drops, taken])

    def _first(self) -> list[_Entry]:
        """What the next batch is made of, as far as it is admitted."""
        wanted = Counter(self._mixture.counts(self._taken))
        first = []
        for entry in self._entries:
            if not entry.taken and wanted[entry.draw.stream]:
                wanted[entry.draw.stream] -= 1
                first.append(entry)
        return first

    def _admit(self) -> None:
        """Give every free slot to a task of its stream."""
        if self._failure is not None or self._wave_is_out():
            return
        for stream in self._free():
            entry = _Entry(self._admitted, self._next(stream))
            self._admitted += 1
            self._entries.append(entry)
            task = asyncio.create_task(self._play(entry), name=f"group {entry.index}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _free(self) -> list[str]:
        """Streams of the free slots, in the order in which they will be trained on."""
        # Batches that were taken and are being trained hold all the slots that were theirs.
        held = Counter(entry.draw.stream for entry in self._entries if not entry.taken)
        free = []
        for batch in range(self._taken, self._released + self.options.ahead + 1):
            for stream in self._mixture.batch(batch):
                if held[stream]:
                    held[stream] -= 1
                else:
                    free.append(stream)
        return free

    def _next(self, stream: str) -> Draw:
        """The next draw of a stream: those to be played again first."""
        for draw in self._again:
            if draw.stream == stream:
                self._again.remove(draw)
                return draw
        draw = Draw(stream, self._drawn[stream])
        self._drawn[stream] += 1
        return draw

    async def _play(self, entry: _Entry) -> None:
        """Consumes: a task. Waits for: the engine and the graders. Unblocks: ``take``."""
        stream, options = self._streams[entry.draw.stream], self.options
        task, id = stream.draw(entry.draw.number)
        try:
            group = await stream.worker.group(
                task, id=id, index=entry.index, size=options.group_size, sampling=options.sampling
            )
            entry.group = self.judge(group)
            self._measured.append(measure([entry.group], stream.solved))
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
        return self.options.ahead == 0 and any(entry.group is None for entry in self._entries)

    def _judge_all(self) -> None:
        """Drop the groups that cannot be trained on."""
        for entry in list(self._entries):
            if entry.group is None or entry.judged:
                continue
            if len(entry.group.scored) < 2:
                self._drop("failed", entry, entry.group)
            elif self.options.drop_flat and entry.group.is_flat:
                self._drop("flat", entry, entry.group)
            else:
                entry.judged = True
                self._mixture.good(entry.draw.stream)

    def _drop_stale(self) -> None:
        """A guard: slots bound the lag of what this feed sampled, but a resumed or foreign group may be older."""
        for entry in list(self._entries):
            if entry.group is None or entry.taken or not entry.judged:
                continue
            if self.version() - entry.group.version_min > self.options.max_lag:
                self._again.append(entry.draw)
                self._drop("stale", entry, entry.group)
        self._admit()

    def _drop(self, reason: str, entry: _Entry, group: Group) -> None:
        self._entries.remove(entry)
        self._dropped[reason] += 1
        self.on_drop(reason, group)
        starved = self._mixture.dropped(entry.draw.stream, reason, group, self._taken)
        self._failure = self._failure or starved

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def penalise_truncated(penalty: float) -> Judge:
    """A judge that subtracts ``penalty`` from the reward of every answer cut by a length limit."""

    def judge(group: Group) -> Group:
        rollouts = [
            replace(r, reward=r.reward - penalty) if r.truncated and r.reward is not None else r for r in group.rollouts
        ]
        return replace(group, rollouts=tuple(rollouts))

    return judge


def as_is(group: Group) -> Group:
    """A judge that changes nothing."""
    return group


def group_to_json(group: Group) -> Any:
    """Plain data of a group, for a checkpoint."""
    import msgspec

    return msgspec.to_builtins(group)


def group_from_json(data: Json) -> Group:
    """Inverse of ``group_to_json``."""
    import msgspec

    return msgspec.convert(data, Group)
