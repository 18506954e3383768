"""Which task comes next: those played again, those that nobody solved, then the epoch's or the curriculum's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tandem.algorithms.curricula.base import Curriculum
from tandem.config.sections import Reroll
from tandem.rollout.agenda import Agenda
from tandem.rollout.cursor import DataState, Draw
from tandem.rollout.streams import Stream
from tandem.types import Group, Task


class Draws:
    """The next task of each stream. What is drawn depends on what was judged and its order alone."""

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        steps: int,
        reroll: Reroll,
        curriculum: Curriculum | None,
        told: Callable[[str], None],
    ) -> None:
        """Of a run of so many steps; ``told`` hears the id of each group whose task nobody solved, as it is drawn."""
        self._streams = {stream.name: stream for stream in streams}
        self._from = reroll.start_fraction * steps if reroll.start_fraction < 1 else None
        self._most, self._told = reroll.max_groups, told
        self._agendas = {name: Agenda(s, curriculum) for name, s in self._streams.items()} if curriculum else {}
        self._drawn: Counter[str] = Counter()
        self._again: list[Draw] = []
        self._unsolved: dict[tuple[str, str], Draw] = {}
        self._rerolled: list[int] = []

    def open(self, data_state: DataState) -> None:
        """Go on where ``data_state`` stands."""
        self._drawn, self._again = Counter(data_state.drawn), list(data_state.again)
        self._unsolved = {self._key(draw): draw for draw in data_state.unsolved}
        self._rerolled = list(data_state.rerolled)
        for name, agenda in self._agendas.items():
            agenda.open(data_state.seen.get(name, {}))
        for draw in (*data_state.again, *(draw for draw, group in data_state.ready if not group.replayed)):
            self._hold(draw)

    def data_state(self) -> DataState:
        """Its part of one."""
        return DataState(
            drawn=dict(self._drawn),
            again=tuple(self._again),
            unsolved=tuple(self._unsolved.values()),
            rerolled=tuple(self._rerolled),
            seen={name: agenda.seen for name, agenda in self._agendas.items()},
        )

    def task(self, draw: Draw) -> tuple[Task, str]:
        """The task of a draw and the id of its group."""
        return self._streams[draw.stream].of(draw)

    def next(self, stream: str, batch: int) -> Draw:
        """The next draw of a stream, for a place of a batch."""
        for draw in self._again:
            if draw.stream == stream:
                self._again.remove(draw)
                return draw
        draw = self._reroll(stream, batch) or self._new(stream)
        self._hold(draw)
        return draw

    def repeat(self, draw: Draw) -> None:
        """Play it again, before any other of its stream."""
        self._again.append(draw)
        self._hold(draw)

    def judged(self, draw: Draw, group: Group) -> None:
        """A group was judged: note what its task did."""
        solved, answers = sum(map(self._streams[draw.stream].solved, group.scored)), len(group.scored)
        if draw.stream in self._agendas and answers:
            self._agendas[draw.stream].note(self._place(draw), solved, answers)
        if self._from is not None:
            self._unsolved.pop(self._key(draw), None)
            if answers > 1 and not solved and group.is_flat:
                self._unsolved[self._key(draw)] = draw._replace(again=draw.again + 1)

    def over(self, draw: Draw) -> None:
        """A group was trained or dropped: a curriculum may choose its task again."""
        if draw.stream in self._agendas:
            self._agendas[draw.stream].free(self._place(draw))

    def taken(self, batches: int) -> None:
        """So many batches are complete."""
        self._rerolled = [batch for batch in self._rerolled if batch >= batches]

    def _reroll(self, stream: str, batch: int) -> Draw | None:
        """A task that nobody solved, if it is time and the batch has not had its share of them."""
        if self._from is None or batch < self._from or self._rerolled.count(batch) >= self._most:
            return None
        for key, draw in self._unsolved.items():
            if draw.stream == stream:
                del self._unsolved[key]
                self._rerolled.append(batch)
                self._told(self.task(draw)[1])
                return draw
        return None

    def _new(self, stream: str) -> Draw:
        number = self._drawn[stream]
        self._drawn[stream] += 1
        return Draw(stream, number, task=self._agendas[stream].draw(number) if self._agendas else None)

    def _hold(self, draw: Draw) -> None:
        if draw.stream in self._agendas:
            self._agendas[draw.stream].hold(self._place(draw))

    def _place(self, draw: Draw) -> int:
        return self._streams[draw.stream].place(draw)

    def _key(self, draw: Draw) -> tuple[str, str]:
        return draw.stream, self.task(draw)[0].id
