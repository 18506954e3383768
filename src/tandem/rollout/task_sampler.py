"""Task sampler: repeats first, then unsolved tasks, then the epoch's or the curriculum's order."""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from tandem.algorithms.curricula.base import Curriculum, SolveCount, TaskHistory
from tandem.config.sections import Reroll
from tandem.errors import EnvError, TandemError, raised
from tandem.rollout.data_state import DataState, Draw, TasksMark
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.measure import Solved
from tandem.types import Group, Task

log = logging.getLogger(__name__)

_EPOCHS = 4
"""Orders that are remembered: tasks of earlier epochs may come again beside those of this one."""
_MARKED = 256
"""Tasks of an environment that its mark is of, evenly over all: a lazy sequence makes no more for it."""

_LISTED = 10_000_000
"""Tasks of which a whole order is kept; one of more, which are made on access, would fill the memory."""


def _shuffled(place: int, count: int, seed: str) -> int:
    """Where a place goes in a shuffle of so many that no list holds: a Feistel network of four rounds."""
    half = (count.bit_length() + 1) // 2
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for turn in range(4):
            left, right = right, left ^ random.Random(f"{seed}/{turn}/{right}").getrandbits(half)
        place = left << half | right
        if place < count:  # else it goes on from there, and comes back in the end
            return place


@dataclass(slots=True, kw_only=True)
class TaskOrder:
    """The tasks of one environment in shuffled epochs."""

    name: str
    """What its groups and metrics bear."""
    label: str
    """Prefix of its groups' ids, which tells them from other environments'."""
    tasks: Sequence[Task]
    """What there is to play."""
    seed: int
    """Fixes the order of the tasks."""
    _orders: dict[int, list[int]] = field(default_factory=dict, init=False)
    _mark: TasksMark | None = field(default=None, init=False)

    @property
    def mark(self) -> TasksMark:
        """What tells its tasks from others, by which a resume sees that they were changed.

        Raises:
            EnvError: the environment's sequence of tasks fails to make one.
        """
        if self._mark is None:
            count, digest = len(self.tasks), hashlib.blake2b(digest_size=16)
            for nth in range(min(count, _MARKED)):
                task = self._task(nth * count // min(count, _MARKED))
                opening = [(message.role, message.content, *message.fields.items()) for message in task.prompt]
                digest.update(repr((task.id, opening, task.answer)).encode(errors="surrogatepass"))
            self._mark = TasksMark(count, digest.hexdigest())
        return self._mark

    def of(self, draw: Draw) -> tuple[Task, str]:
        """The task of a draw and the id of its group.

        Every epoch is one shuffle of all tasks, fixed by the seed, and a group's visit is the epoch. What a curriculum
        chose is visited once in every draw. Tasks that come again have their count behind it.

        Raises:
            EnvError: the environment's sequence of tasks fails to make this one.
        """
        task = self._task(self.place(draw))
        visit = draw.number // len(self.tasks) if draw.task is None else draw.number
        return task, f"{self.label}{task.id}@{visit}{f'.{draw.again}' if draw.again else ''}"

    def _task(self, place: int) -> Task:
        try:
            return self.tasks[place]
        except TandemError:
            raise
        except Exception as error:  # the boundary to the user's environment
            raise EnvError(f"environment {self.name}: task {place} of its sequence {raised(error)}") from error

    def place(self, draw: Draw) -> int:
        """Place of a draw's task among all of them."""
        if draw.task is not None:
            return draw.task
        epoch, place = divmod(draw.number, len(self.tasks))
        if len(self.tasks) > _LISTED:
            return _shuffled(place, len(self.tasks), f"{self.seed}/{self.label}{epoch}")
        if epoch not in self._orders:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{self.label}{epoch}").shuffle(order)
            while len(self._orders) >= _EPOCHS:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return self._orders[epoch][place]


@dataclass(slots=True, kw_only=True)
class EnvRunner(TaskOrder):
    """One environment of a run: its tasks, what plays them, and its share of each batch."""

    group_runner: GroupRunner
    solved: Solved
    """What counts as a right answer."""
    weight: float = 1.0
    """Share of the groups, against the other environments' weights."""
    min_share: float = 0.0
    """Least share of the groups, whatever the weights."""


class CurriculumSchedule:
    """Order of an environment's tasks by a curriculum.

    Epochs in which some tasks come more often than others: a task of weight w is due 1 / w epochs after it was due
    last, and comes up to half an epoch sooner or later, so that it meets others each time. If all weights are 1, every
    epoch is one shuffle of all tasks; a task of weight 1/20 comes in one of twenty. Turns are spread more evenly than
    lots, and so is the gradient. A task that is being played does not come until that is over.
    """

    def __init__(self, runner: EnvRunner, curriculum: Curriculum) -> None:
        """Nothing was played yet."""
        self._runner, self._curriculum = runner, curriculum
        self._seen: dict[int, TaskHistory] = {}
        self._held: Counter[int] = Counter()
        self._turns: list[tuple[float, int]] = []
        self._next: dict[int, tuple[float, float]] = {}
        self._now = 0.0

    def open(self, seen: Mapping[int, TaskHistory]) -> None:
        """What is known from before."""
        self._seen, self._held = dict(seen), Counter()
        self._now = max((history.at for history in seen.values()), default=0.0)
        self._next = {place: self._turn(place) for place in range(len(self._runner.tasks))}
        self._turns = sorted((turn, place) for place, (turn, _) in self._next.items() if turn < math.inf)

    @property
    def seen(self) -> Mapping[int, TaskHistory]:
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
            lot = random.Random(f"{self._runner.seed}/{self._runner.label}{number}/agenda")
            place = lot.randrange(len(self._runner.tasks))
        self._now = max(self._now, due)
        self._seen[place] = self._seen.get(place, TaskHistory())._replace(at=due)
        return place

    def note(self, place: int, solved: int, answers: int) -> None:
        """A group of a task was scored."""
        self._seen[place] = self._seen.get(place, TaskHistory()).after(SolveCount(solved, answers))

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
        task, seen = self._runner.tasks[place], self._seen.get(place, TaskHistory())
        returned: object = self._curriculum.weight(task, seen)
        weight = float(returned) if isinstance(returned, Real) else math.nan
        if not 0.0 <= weight < math.inf:
            raise EnvError(f"the curriculum gave task {task.id} the weight {returned}; it must be finite, 0 or more")
        if not weight:
            return math.inf, math.inf
        gap = 1.0 / weight
        due = seen.at + gap if place in self._seen else 0.5
        lot = random.Random(f"{self._runner.seed}/{self._runner.label}{place}/{seen.played}").random()
        return due + (lot - 0.5) * min(1.0, gap), due


class TaskSampler:
    """The next task of each environment; what is drawn depends on the scored groups and their order alone."""

    def __init__(
        self,
        runners: Sequence[EnvRunner],
        steps: int,
        reroll: Reroll,
        curriculum: Curriculum | None,
        on_reroll: Callable[[str], None],
    ) -> None:
        """Of a run of so many steps; ``on_reroll`` gets the id of each group whose unsolved task is drawn."""
        self._runners = {runner.name: runner for runner in runners}
        self._from = reroll.start_fraction * steps if reroll.start_fraction < 1 else None
        self._max_rerolls, self._on_reroll = reroll.max_groups, on_reroll
        named = self._runners.items()
        self._schedules = {name: CurriculumSchedule(runner, curriculum) for name, runner in named if curriculum}
        self._drawn: Counter[str] = Counter()
        self._again: list[Draw] = []
        self._unsolved: dict[tuple[str, str], Draw] = {}
        self._rerolled: list[int] = []

    def open(self, data_state: DataState) -> None:
        """Go on where ``data_state`` stands.

        Raises:
            EnvError: a curriculum has chosen tasks that are not there any more.
        """
        for name, mark in data_state.tasks.items():
            if name in self._runners:
                self._compare(self._runners[name], mark, data_state.seen.get(name, {}))
        self._drawn, self._again = Counter(data_state.drawn), list(data_state.again)
        self._unsolved = {self._key(draw): draw for draw in data_state.unsolved}
        self._rerolled = list(data_state.rerolled)
        for name, schedule in self._schedules.items():
            schedule.open(data_state.seen.get(name, {}))
        for draw in (*data_state.again, *(draw for draw, group in data_state.ready if not group.replayed)):
            self._hold(draw)

    @staticmethod
    def _compare(runner: EnvRunner, before: TasksMark, seen: Mapping[int, TaskHistory]) -> None:
        """Tell of tasks that were changed since the checkpoint; refuse those in which the curriculum's places lack."""
        if runner.mark == before:
            return
        counts = f"{before.number} then, {runner.mark.number} now"
        changed = f"environment {runner.name}: its tasks are not those that the checkpoint was written with ({counts})"
        if any(place >= runner.mark.number for place in seen):
            gone = "and some that the curriculum chose are gone; put its data back, or start a new run"
            raise EnvError(f"{changed}, {gone}")
        again = "some of this epoch may come twice or not at all; put its data back to go on with the run as begun"
        log.warning("%s: %s", changed, again)

    def data_state(self) -> DataState:
        """Its part of one."""
        return DataState(
            drawn=dict(self._drawn),
            again=tuple(self._again),
            unsolved=tuple(self._unsolved.values()),
            rerolled=tuple(self._rerolled),
            seen={name: schedule.seen for name, schedule in self._schedules.items()},
            tasks={name: runner.mark for name, runner in self._runners.items()},
        )

    def task(self, draw: Draw) -> tuple[Task, str]:
        """The task of a draw and the id of its group."""
        return self._runners[draw.env].of(draw)

    def next(self, env: str, batch: int) -> Draw:
        """The next draw of an environment, for a place of a batch."""
        for draw in self._again:
            if draw.env == env:
                self._again.remove(draw)
                return draw
        draw = self._reroll(env, batch) or self._new(env)
        self._hold(draw)
        return draw

    def repeat(self, draw: Draw) -> None:
        """Play it again, before any other of its environment."""
        self._again.append(draw)
        self._hold(draw)

    def scored(self, draw: Draw, group: Group) -> None:
        """A group was scored: note what its task did."""
        solved, answers = sum(map(self._runners[draw.env].solved, group.scored)), len(group.scored)
        if draw.env in self._schedules and answers:
            self._schedules[draw.env].note(self._place(draw), solved, answers)
        if self._from is not None:
            self._unsolved.pop(self._key(draw), None)
            if answers > 1 and not solved and group.zero_variance:
                self._unsolved[self._key(draw)] = draw._replace(again=draw.again + 1)

    def over(self, draw: Draw) -> None:
        """A group was trained or dropped: a curriculum may choose its task again."""
        if draw.env in self._schedules:
            self._schedules[draw.env].free(self._place(draw))

    def taken(self, batches: int) -> None:
        """So many batches are complete."""
        self._rerolled = [batch for batch in self._rerolled if batch >= batches]

    def _reroll(self, env: str, batch: int) -> Draw | None:
        """An unsolved task, if it is time and the batch has not had its share of them."""
        if self._from is None or batch < self._from or self._rerolled.count(batch) >= self._max_rerolls:
            return None
        for key, draw in self._unsolved.items():
            if draw.env == env:
                del self._unsolved[key]
                self._rerolled.append(batch)
                self._on_reroll(self.task(draw)[1])
                return draw
        return None

    def _new(self, env: str) -> Draw:
        number = self._drawn[env]
        self._drawn[env] += 1
        return Draw(env, number, task=self._schedules[env].draw(number) if self._schedules else None)

    def _hold(self, draw: Draw) -> None:
        if draw.env in self._schedules:
            self._schedules[draw.env].hold(self._place(draw))

    def _place(self, draw: Draw) -> int:
        return self._runners[draw.env].place(draw)

    def _key(self, draw: Draw) -> tuple[str, str]:
        return draw.env, self.task(draw)[0].id
