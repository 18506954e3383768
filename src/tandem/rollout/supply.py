"""Where the training loop's groups come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from tandem.metrics import Value
from tandem.rollout.cursor import Cursor
from tandem.types import Group


class Supply(Protocol):
    """Groups played here (``feed.Feed``) or elsewhere (``foreign.BrokerFeed``)."""

    def open(self, cursor: Cursor) -> AbstractAsyncContextManager[Supply]:
        """Go on where ``cursor`` stands."""
        ...

    async def take(self) -> list[Group]:
        """The groups of one optimizer step; they count as trained in every later ``cursor``."""
        ...

    def release(self, groups: Sequence[Group]) -> None:
        """The step that took these groups is over."""
        ...

    def cursor(self) -> Cursor:
        """Where it stands now."""
        ...

    async def saved(self, cursor: Cursor) -> None:
        """A checkpoint that holds ``cursor`` is on disk: what it remembers need not be given again."""
        ...

    def metrics(self) -> Mapping[str, Value]:
        """What arrived since the last call."""
        ...
