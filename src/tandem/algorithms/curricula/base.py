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
    """History of a task: plays, recent solve counts, last draw."""

    played: int = 0
    """Its groups that were scored."""
    recent: tuple[SolveCount, ...] = ()
    """The last ``RECENT`` of them, oldest first."""
    at: float = 0.0
    """When it was drawn last, in epochs: a task of weight 1 comes once in each."""

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
        """How often this task comes in an epoch, in the long run: 1 is once, 0 never again; it is finite.

        A pure function of its arguments: it is called after each play of the task, and again when a run is resumed.
        """
