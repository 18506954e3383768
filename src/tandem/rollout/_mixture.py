"""Which environment each place of a batch belongs to, those left out that give nothing to train on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.errors import Starved
from tandem.rollout.streams import Stream, Timetable
from tandem.types import Group

log = logging.getLogger(__name__)

REST = 20
"""Batches for which a stream that gave nothing to train on is left out, before it is tried again."""


class Mixture:
    """The timetable of those streams that give something to train on.

    A stream whose groups are dropped one after the other is left out for ``REST`` batches, and its places go to the
    others by their shares. Then it is tried again: the first group of it that can be trained on brings it back, and
    one batch's worth of others sends it away again. What is decided depends on the groups and their order alone.
    """

    def __init__(self, streams: Sequence[Stream], places: int, patience: int) -> None:
        """Of batches with this many places; ``patience`` is in batches' worth of a stream's groups."""
        self._streams = {stream.name: stream for stream in streams}
        self._places, self._patience = places, patience
        self._tables: dict[tuple[str, ...], Timetable] = {}
        self._spent: set[str] = set()
        self._barren: Counter[str] = Counter()  # groups of each stream that were dropped in a row
        self.resting: dict[str, int] = {}
        """The batch from which a stream is tried again, of those that have given nothing since they were left out."""

    def counts(self, batch: int) -> Mapping[str, int]:
        """Groups of each stream in a batch, from 0."""
        return self._table(self._awake(batch)).counts(batch)

    def batch(self, batch: int) -> list[str]:
        """Streams of a batch's places."""
        return self._table(self._awake(batch)).batch(batch)

    def good(self, stream: str) -> None:
        """A group of a stream can be trained on."""
        self._spent.clear()
        self._barren[stream] = 0
        if self.resting.pop(stream, None) is not None:
            log.warning("%s gives groups that can be trained on again; it has its share as before", stream)

    def dropped(self, stream: str, reason: str, group: Group, batch: int) -> Starved | None:
        """A group of a stream was dropped while a batch was filled; an error if nobody is left who could fill it."""
        if self.resting.get(stream, 0) > batch:
            return None  # of those that were being played when it was left out
        self._barren[stream] += 1
        count, whole = self._barren[stream], max(1, self._table(tuple(self._streams)).counts(batch)[stream])
        again = stream in self.resting
        if count <= (whole - 1 if again else self._patience * whole):
            return None
        self._spent.add(stream)
        if len(self._spent) == len(self._streams):
            return Starved(_starved(count, reason, group, len(self._streams)))
        self.resting[stream], self._barren[stream] = batch + REST, 0
        if not self._awake(batch):  # the others are tried at once: they may have something by now
            self.resting.update(dict.fromkeys(self._streams.keys() - self._spent, batch))
        log.log(logging.INFO if again else logging.WARNING, "%s", _left_out(count, reason, group, stream))
        return None

    def _awake(self, batch: int) -> tuple[str, ...]:
        return tuple(name for name in self._streams if self.resting.get(name, 0) <= batch)

    def _table(self, names: tuple[str, ...]) -> Timetable:
        if names not in self._tables:
            self._tables[names] = Timetable([self._streams[name] for name in names], self._places)
        return self._tables[names]


def _left_out(count: int, reason: str, group: Group, stream: str) -> str:
    return (
        f"{stream}: {_seen(count, reason, group)}. Its share goes to the other environments, and after {REST} steps it "
        f"is tried again. {_advice(stream)}"
    )


def _starved(count: int, reason: str, group: Group, streams: int) -> str:
    nor = ", nor those of the other environments" if streams > 1 else ""
    return f"{_seen(count, reason, group)}{nor}. {_advice(group.env)}"


def _seen(count: int, reason: str, group: Group) -> str:
    example = group.rollouts[0]
    detail = f"the last group, {group.id}, got rewards {[r.reward for r in group.rollouts]}"
    if reason == "failed":
        detail += f"; first failure: {next((r.error for r in group.rollouts if r.error), 'no reward')}"
    else:
        detail += f"; its first answer was {example.text[:200]!r}"
    return f"{count} groups in a row could not be trained on ({reason}); {detail}"


def _advice(env: str) -> str:
    return (
        f"Make {env} easier or harder, sample more answers (group_size), raise the temperature, or keep such groups "
        "(flat_groups: keep)"
    )
