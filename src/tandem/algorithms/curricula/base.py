"""The curriculum contract: how often each task is drawn, by its history."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tandem.types import Task

RECENT = 4
"""Plays of a task that are remembered: older ones are of a policy that has changed since."""


class SolveCount(NamedTuple):
    """Solved and scored answers of one play of a task."""

    solved: int
    """Right answers."""
    answers: int
    """Answers that were scored."""


class TaskHistory(NamedTuple):
    """History of a task: plays and recent solve counts."""

    played: int = 0
    """Its groups that were scored."""
    recent: tuple[SolveCount, ...] = ()
    """The last ``RECENT`` of them, oldest first."""

    @property
    def rate(self) -> float | None:
        """Share of right answers in recent plays; None before there are any."""
        answers = sum(play.answers for play in self.recent)
        return sum(play.solved for play in self.recent) / answers if answers else None

    def after(self, play: SolveCount) -> TaskHistory:
        """The history with one more play."""
        return self._replace(played=self.played + 1, recent=(*self.recent, play)[-RECENT:])


class Curriculum(Protocol):
    """A frozen dataclass whose fields are its options."""

    def weight(self, task: Task, seen: TaskHistory) -> float:
        """Share of the epochs in which this task comes: 1 is all of them, 0 none.

        A pure function of its arguments: it is called whenever it is the task's turn.
        """
