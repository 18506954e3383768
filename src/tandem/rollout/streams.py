"""Several environments in one run: each one's tasks in order, and how many groups of each a batch holds."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tandem.config.sources import exactly
from tandem.rollout.cursor import Draw
from tandem.rollout.measure import Solved
from tandem.rollout.worker import Worker
from tandem.types import Task

_EPOCHS = 4
"""Orders that are remembered: tasks of earlier epochs may come again beside those of this one."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """The tasks of one environment, drawn epoch by epoch."""

    name: str
    """What its groups and metrics bear."""
    label: str
    """What the ids of its groups begin with, to tell them from other streams'."""
    worker: Worker
    """Plays."""
    tasks: Sequence[Task]
    """What there is to play."""
    solved: Solved
    """What counts as a right answer."""
    seed: int
    """Fixes the order of the tasks."""
    weight: float = 1.0
    """Share of the groups, against the other streams' weights."""
    min_share: float = 0.0
    """Least share of the groups, whatever the weights."""
    _orders: dict[int, list[int]] = field(default_factory=dict, init=False)

    def of(self, draw: Draw) -> tuple[Task, str]:
        """The task of a draw and the id of its group.

        Every epoch is one shuffle of all tasks, fixed by the seed, and a group's visit is the epoch. What a curriculum
        chose is visited once in every draw. Tasks that come again have their count behind it.
        """
        task = self.tasks[self.place(draw)]
        visit = draw.number // len(self.tasks) if draw.task is None else draw.number
        return task, f"{self.label}{task.id}@{visit}{f'.{draw.again}' if draw.again else ''}"

    def place(self, draw: Draw) -> int:
        """Place of a draw's task among all of them."""
        if draw.task is not None:
            return draw.task
        epoch, place = divmod(draw.number, len(self.tasks))
        if epoch not in self._orders:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{self.label}{epoch}").shuffle(order)
            while len(self._orders) >= _EPOCHS:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return self._orders[epoch][place]


class Timetable:
    """Which stream each place of each batch belongs to: a matter of weights and the batch's number alone.

    Every batch credits each stream with its share of the places, and the places go to those with most credit; what a
    batch cannot divide evenly is made up for in the next. So shares hold over time to within one place or so, and a
    stream has ``floor(min_share * places)`` places of every batch.
    """

    def __init__(self, streams: Sequence[Stream], places: int) -> None:
        """Of batches with this many places."""
        self._names = [stream.name for stream in streams]
        shares = _shares(streams)
        scale = math.lcm(*(share.denominator for share in shares))
        # Whole numbers, in units of 1/scale of a place: nothing is ever rounded, however long the run.
        self._earned = [int(share * scale) * places for share in shares]
        self._least = [math.floor(exactly(stream.min_share) * places) for stream in streams]
        self._scale, self._places = scale, places
        self._credit = [0] * len(streams)
        self._counts: list[tuple[int, ...]] = []

    def counts(self, batch: int) -> Mapping[str, int]:
        """Groups of each stream in a batch, from 0."""
        while len(self._counts) <= batch:
            self._counts.append(self._next())
        return dict(zip(self._names, self._counts[batch], strict=True))

    def batch(self, batch: int) -> list[str]:
        """Streams of a batch's places, each one's spread evenly over it."""
        counts = self.counts(batch)
        spread = [
            (Fraction(2 * nth + 1, 2 * count), at, name)
            for at, (name, count) in enumerate(counts.items())
            for nth in range(count)
        ]
        return [name for _, _, name in sorted(spread)]

    def _next(self) -> tuple[int, ...]:
        counts = list(self._least)
        credit = [had + earned for had, earned in zip(self._credit, self._earned, strict=True)]
        for _ in range(self._places - sum(counts)):
            neediest = max(range(len(counts)), key=lambda at: credit[at] - counts[at] * self._scale)
            counts[neediest] += 1
        self._credit = [had - count * self._scale for had, count in zip(credit, counts, strict=True)]
        return tuple(counts)


def _shares(streams: Sequence[Stream]) -> list[Fraction]:
    """What part of all groups each stream gets: by weight, but for those that would fall below their least share."""
    least = [exactly(stream.min_share) for stream in streams]
    weights = [exactly(stream.weight) for stream in streams]
    lifted: set[int] = set()
    while True:
        left = 1 - sum((least[at] for at in lifted), start=Fraction(0))
        total = sum((weight for at, weight in enumerate(weights) if at not in lifted), start=Fraction(0))
        shares = [least[at] if at in lifted else left * weights[at] / total for at in range(len(weights))]
        below = {at for at, share in enumerate(shares) if share < least[at]}
        if not below:
            return shares
        lifted |= below
