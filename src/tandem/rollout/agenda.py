"""When each task of a stream comes next, by a curriculum: epochs in which some tasks come more often than others.

There is a clock that tells epochs. A task of weight w is due 1 / w epochs after it was due last, and comes up to half
an epoch sooner or later, so that it meets others each time. If all weights are 1, every epoch is one shuffle of all
tasks; a task of weight 1/20 comes in one of twenty. Turns are spread more evenly than lots, and so is the gradient.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Mapping

from tandem.algorithms.curricula.base import Curriculum, Seen, Tally
from tandem.errors import EnvError
from tandem.rollout.streams import Stream


class Agenda:
    """The next task of a stream. One that is being played does not come until that is over."""

    def __init__(self, stream: Stream, curriculum: Curriculum) -> None:
        """Nothing was played yet."""
        self._stream, self._curriculum = stream, curriculum
        self._seen: dict[int, Seen] = {}
        self._held: Counter[int] = Counter()
        self._turns: list[tuple[float, int]] = []
        self._next: dict[int, tuple[float, float]] = {}
        self._now = 0.0

    def open(self, seen: Mapping[int, Seen]) -> None:
        """What is known from before."""
        self._seen, self._held = dict(seen), Counter()
        self._now = max((one.at for one in seen.values()), default=0.0)
        self._next = {place: self._turn(place) for place in range(len(self._stream.tasks))}
        self._turns = sorted((turn, place) for place, (turn, _) in self._next.items() if turn < math.inf)

    @property
    def seen(self) -> Mapping[int, Seen]:
        """What came of each task that was drawn, by its place."""
        return dict(sorted(self._seen.items()))

    def draw(self, number: int) -> int:
        """Place of the task whose turn it is; ``number`` counts draws."""
        due = self._now
        while self._turns:
            turn, place = heapq.heappop(self._turns)
            if place in self._next and self._next[place][0] == turn:  # else it has another turn by now, or is held
                # One that was held for long does not make up for what it missed.
                due = max(self._next[place][1], self._now - 1.0)
                break
        else:  # fewer tasks than places, or none of them has a weight
            lot = random.Random(f"{self._stream.seed}/{self._stream.label}{number}/agenda")
            place = lot.randrange(len(self._stream.tasks))
        self._now = max(self._now, due)
        self._seen[place] = self._seen.get(place, Seen())._replace(at=due)
        return place

    def note(self, place: int, solved: int, answers: int) -> None:
        """A group of a task was judged."""
        self._seen[place] = self._seen.get(place, Seen()).after(Tally(solved, answers))

    def hold(self, place: int) -> None:
        """A task is being played."""
        self._held[place] += 1
        self._next.pop(place, None)

    def free(self, place: int) -> None:
        """It no longer is."""
        self._held[place] -= 1
        if not self._held[place]:
            self._next[place] = self._turn(place)
            if self._next[place][0] < math.inf:
                heapq.heappush(self._turns, (self._next[place][0], place))

    def _turn(self, place: int) -> tuple[float, float]:
        """When a task comes and when it is due, by what is known of it alone."""
        task, seen = self._stream.tasks[place], self._seen.get(place, Seen())
        weight = self._curriculum.weight(task, seen)
        if not 0.0 <= weight < math.inf:
            raise EnvError(f"the curriculum gave task {task.id} the weight {weight}; it must be at least 0 and finite")
        if not weight:
            return math.inf, math.inf
        gap = 1.0 / weight
        due = seen.at + gap if place in self._seen else 0.5
        lot = random.Random(f"{self._stream.seed}/{self._stream.label}{place}/{seen.played}").random()
        return due + (lot - 0.5) * min(1.0, gap), due
