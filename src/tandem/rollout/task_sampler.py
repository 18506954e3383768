"""Task sampler: repeats first, then unsolved tasks, then the epoch's or the curriculum's order."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

from tandem.algorithms.curricula.base import Curriculum, SolveCount, TaskHistory
from tandem.config.sections import Reroll
from tandem.errors import EnvError, TandemError, raised
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.measure import Solved
from tandem.rollout.source import DataState, Draw, TasksMark
from tandem.types import Group, Task

log = logging.getLogger(__name__)

_EPOCHS = 4
"""Orders that are remembered: tasks of earlier epochs may come again beside those of this one."""
_MARKED = 256
"""Tasks of an environment that its mark is of, evenly over all: a lazy sequence makes no more for it."""
_LISTED = 10_000_000
"""Tasks that are shuffled; of more, which are made on access, each is drawn by itself: one hardly comes twice."""
_TRIES = 1000
"""Tasks that a curriculum may leave out one after the other; then the next one comes, whatever its weight."""


@dataclass(kw_only=True)
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

    @cached_property
    def mark(self) -> TasksMark:
        """What tells its tasks from others, by which a resume sees that they were changed.

        Raises:
            EnvError: the environment's sequence of tasks fails to make one.
        """
        count, digest = len(self.tasks), hashlib.blake2b(digest_size=16)
        for nth in range(min(count, _MARKED)):
            task = self._task(nth * count // min(count, _MARKED))
            opening = [(message.role, message.content, *message.fields.items()) for message in task.prompt]
            digest.update(repr((task.id, opening, task.answer)).encode(errors="surrogatepass"))
        return TasksMark(count, digest.hexdigest())

    def of(self, draw: Draw) -> tuple[Task, str]:
        """The task of a draw and the id of its group.

        Every epoch is one shuffle of all tasks, fixed by the seed, and a group's visit is the epoch. Tasks that come
        again have their count behind it.

        Raises:
            EnvError: the environment's sequence of tasks fails to make this one.
        """
        task = self._task(self.place(draw))
        visit = draw.number // len(self.tasks)
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
        epoch, place = divmod(draw.number, len(self.tasks))
        if len(self.tasks) > _LISTED:
            return random.Random(f"{self.seed}/{self.label}{draw.number}").randrange(len(self.tasks))
        if epoch not in self._orders:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{self.label}{epoch}").shuffle(order)
            while len(self._orders) >= _EPOCHS:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return self._orders[epoch][place]


@dataclass(kw_only=True)
class EnvRunner(TaskOrder):
    """One environment of a run: its tasks, what plays them, and its share of each batch."""

    group_runner: GroupRunner
    solved: Solved
    """What counts as a right answer."""
    weight: float = 1.0
    """Share of the groups, against the other environments' weights."""
    min_share: float = 0.0
    """Least share of the groups, whatever the weights."""


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
        self._curriculum = curriculum
        self._seen: dict[str, dict[int, TaskHistory]] = {}
        self._held: Counter[tuple[str, int]] = Counter()
        self._drawn: Counter[str] = Counter()
        self._again: list[Draw] = []
        self._unsolved: dict[tuple[str, int], Draw] = {}
        self._rerolled: list[int] = []

    def open(self, data_state: DataState) -> None:
        """Go on where ``data_state`` stands."""
        for name, mark in data_state.tasks.items():
            if name in self._runners and (now := self._runners[name].mark) != mark:
                changed = f"{name}: its tasks are not those that the checkpoint was written with"
                again = "some of this epoch may come twice or not at all; put its data back to go on as begun"
                log.warning("environment %s (%d then, %d now): %s", changed, mark.number, now.number, again)
        self._drawn, self._again = Counter(data_state.drawn), list(data_state.again)
        self._unsolved = {self._key(draw): draw for draw in data_state.unsolved}
        self._rerolled = list(data_state.rerolled)
        self._seen = {name: dict(seen) for name, seen in data_state.seen.items()}
        for draw in (*data_state.again, *(draw for draw, group in data_state.ready if not group.replayed)):
            self._hold(draw)

    def data_state(self) -> DataState:
        """Its part of one."""
        return DataState(
            drawn=dict(self._drawn),
            again=tuple(self._again),
            unsolved=tuple(self._unsolved.values()),
            rerolled=tuple(self._rerolled),
            seen={name: dict(sorted(seen.items())) for name, seen in self._seen.items()},
            tasks={name: runner.mark for name, runner in self._runners.items()},
        )

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
        if self._curriculum is not None and answers:
            seen, (_, place) = self._seen.setdefault(draw.env, {}), self._key(draw)
            seen[place] = seen.get(place, TaskHistory()).after(SolveCount(solved, answers))
        if self._from is not None:
            self._unsolved.pop(self._key(draw), None)
            if answers > 1 and not solved and group.zero_variance:
                self._unsolved[self._key(draw)] = draw._replace(again=draw.again + 1)

    def over(self, draw: Draw) -> None:
        """A group was trained or dropped: a curriculum may choose its task again."""
        if self._curriculum is not None:
            self._held[self._key(draw)] -= 1

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
                self._on_reroll(self._runners[env].of(draw)[1])
                return draw
        return None

    def _new(self, env: str) -> Draw:
        for _ in range(_TRIES):
            draw = Draw(env, self._drawn[env])
            self._drawn[env] += 1
            if self._curriculum is None or self._comes(draw, self._curriculum):
                break
        return draw

    def _comes(self, draw: Draw, curriculum: Curriculum) -> bool:
        """Whether a task has its turn in an epoch: with a chance that is its weight, and not while it is played."""
        runner, (env, place) = self._runners[draw.env], self._key(draw)
        if self._held[env, place]:
            return False
        task, _ = runner.of(draw)
        returned: object = curriculum.weight(task, self._seen.get(env, {}).get(place, TaskHistory()))
        weight = float(returned) if isinstance(returned, Real) else math.nan
        if not 0.0 <= weight <= 1.0:
            raise EnvError(f"the curriculum gave task {task.id} the weight {returned}; it must be from 0 to 1")
        return random.Random(f"{runner.seed}/{runner.label}{draw.number}/curriculum").random() < weight

    def _hold(self, draw: Draw) -> None:
        if self._curriculum is not None:
            self._held[self._key(draw)] += 1

    def _key(self, draw: Draw) -> tuple[str, int]:
        """What a draw's task is known by, however often it is drawn."""
        return draw.env, self._runners[draw.env].place(draw)
