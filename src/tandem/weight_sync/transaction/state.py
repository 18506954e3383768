"""State of a weight-sync session, and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class SyncState(Enum):
    """State of a weight-sync session: what the engine serves, and what an abort has to undo."""

    SERVING = "serving"
    """The engine serves what was published last, or before the first publish what it was started on."""
    PAUSED = "paused"
    """It is paused, or a new version is laid beside the one it serves: giving up lets it go on as before."""
    WRITING = "writing"
    """The memory that it samples from may hold values it does not serve: giving up stops it."""
    STOPPED = "stopped"
    """A publish was given up: it gives out nothing until one succeeds."""


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
"""Which state may follow which."""


class SyncStateMachine:
    """A sync state that changes only as the table of transitions allows."""

    def __init__(self) -> None:
        """Of an engine that serves."""
        self.state = SyncState.SERVING

    def pause(self) -> None:
        """A publish begins, or goes on: what is written already stays so."""
        if self.state in (SyncState.SERVING, SyncState.STOPPED):
            self.become(SyncState.PAUSED)

    def write(self) -> None:
        """Memory that the engine samples from is about to be written. Again does nothing."""
        if self.state is not SyncState.WRITING:
            self.become(SyncState.WRITING)

    def become(self, state: SyncState) -> None:
        """Go on to a state.

        Raises:
            RuntimeError: it may not follow the present one.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a weight sync that is {self.state.value} cannot become {state.value}")
        self.state = state
