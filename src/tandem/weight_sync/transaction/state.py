"""State of a weight-sync session, and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class SyncState(Enum):
    """State of a weight-sync session: what the engine serves, and what an abort has to undo."""

    SERVING = "serving"
    """The engine serves the last published weights; before the first publish, those it started on."""
    PAUSED = "paused"
    """The engine is paused, or a new version lies beside the one it serves: an abort lets it go on as before."""
    WRITING = "writing"
    """The memory it samples from may hold weights that are not verified: an abort stops it."""
    STOPPED = "stopped"
    """A publish was aborted: the engine gives out nothing until one succeeds."""


TRANSITIONS: Mapping[SyncState, frozenset[SyncState]] = {
    # pause
    SyncState.SERVING: frozenset({SyncState.PAUSED}),
    # transfer; resume, where no memory was written that is served; or abort
    SyncState.PAUSED: frozenset({SyncState.WRITING, SyncState.SERVING}),
    # resume; or abort
    SyncState.WRITING: frozenset({SyncState.SERVING, SyncState.STOPPED}),
    # pause, for a publish that is repeated
    SyncState.STOPPED: frozenset({SyncState.PAUSED}),
}
"""States that may follow each state."""


class SyncStateMachine:
    """A sync state that changes only as the table of transitions allows."""

    def __init__(self) -> None:
        self.state = SyncState.SERVING

    def pause(self) -> None:
        """Begin a publish; does nothing in one that has begun."""
        if self.state in (SyncState.SERVING, SyncState.STOPPED):
            self.become(SyncState.PAUSED)

    def write(self) -> None:
        """The memory that the engine samples from is about to be written; calling it again does nothing."""
        if self.state is not SyncState.WRITING:
            self.become(SyncState.WRITING)

    def become(self, state: SyncState) -> None:
        """Change the state.

        Raises:
            RuntimeError: the table of transitions does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a weight sync that is {self.state.value} cannot become {state.value}")
        self.state = state
