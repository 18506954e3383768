"""An entry of the rollout buffer: an admitted task, and the states it goes through until it was trained or dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from tandem.rollout.data_state import Draw
from tandem.types import Group


class EntryState(Enum):
    """State of an admitted task, from its admission until it was trained or dropped."""

    QUEUED = "queued"
    """Admitted: it holds a slot, and its rollouts have not begun."""
    RUNNING = "running"
    """Its rollouts are sampled and graded."""
    SCORED = "scored"
    """Every rollout has its reward; on policy it waits here until its whole wave is scored."""
    READY = "ready"
    """Accepted: it waits for its place in a batch."""
    TAKEN = "taken"
    """In the batch that is trained."""
    TRAINED = "trained"
    """Trained; its slot is free."""
    DROPPED = "dropped"
    """Not trained: failed, zero-variance, stale or surplus; its slot is free."""


TRANSITIONS: Mapping[EntryState, frozenset[EntryState]] = {
    EntryState.QUEUED: frozenset({EntryState.RUNNING}),
    EntryState.RUNNING: frozenset({EntryState.SCORED, EntryState.DROPPED}),
    EntryState.SCORED: frozenset({EntryState.READY, EntryState.DROPPED}),
    EntryState.READY: frozenset({EntryState.TAKEN, EntryState.DROPPED}),
    EntryState.TAKEN: frozenset({EntryState.TRAINED}),
    EntryState.TRAINED: frozenset(),
    EntryState.DROPPED: frozenset(),
}
"""Transitions: the states that may follow each state. A resumed run's entries begin as QUEUED or READY."""


@dataclass(slots=True, eq=False)
class Entry:
    """An admitted task, its state, and its group once it is scored."""

    index: int
    """Its place in the order of admission."""
    draw: Draw
    state: EntryState = EntryState.QUEUED
    _group: Group | None = None
    task: asyncio.Task[None] | None = None
    """Plays it, where it is played here."""

    @classmethod
    def restored(cls, draw: Draw, group: Group) -> Entry:
        """An entry that a checkpoint had READY."""
        return cls(group.index, draw, EntryState.READY, group)

    @property
    def in_flight(self) -> bool:
        """Its rollouts are not scored yet."""
        return self.state in (EntryState.QUEUED, EntryState.RUNNING)

    @property
    def group(self) -> Group:
        """Its rollouts with their rewards.

        Raises:
            RuntimeError: they are not scored yet.
        """
        if self._group is None:
            raise RuntimeError(f"entry {self.index} of the rollout buffer is {self.state.value}: it has no group yet")
        return self._group

    def score(self, group: Group) -> None:
        """Its rollouts have their rewards."""
        self.become(EntryState.SCORED)
        self._group = group

    def replay(self, draw: Draw, stored: Group) -> None:
        """A group that was trained before takes the place of its own."""
        self.become(EntryState.READY)
        self.draw, self._group = draw, replace(stored, index=self.index)

    def become(self, state: EntryState) -> None:
        """Go on to a state.

        Raises:
            RuntimeError: none that may follow its own.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"entry {self.index} is {self.state.value} and cannot become {state.value}")
        self.state = state
