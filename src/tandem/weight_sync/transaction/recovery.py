"""Recovery of a weight-sync session after an engine's restart: what is bound and published, and what is repeated."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tandem.engines.base import Engine
from tandem.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
"""Attempts at one publish whose engine dies."""


class Recovery:
    """Recovery of a session after an engine's restart: rebinds to the new start and publishes to it again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bound = self._published = -1

    @property
    def is_bound(self) -> bool:
        """False if the engine restarted since it was bound: its memory is at other addresses."""
        return self._bound == self._engine.restart_count

    @property
    def is_published(self) -> bool:
        """False if the engine restarted since the last publish: it serves the weights it started on."""
        return self._published == self._engine.restart_count

    def bound(self) -> None:
        """Record that the present start of the engine is bound."""
        self._bound = self._engine.restart_count

    def published(self) -> None:
        """Record that the present start of the engine serves the published weights."""
        self._bound = self._published = self._engine.restart_count

    async def repeat(self, work: Callable[[], Awaitable[T]], again: str) -> T:
        """Await ``work``; repeat it if the engine died meanwhile and was restarted.

        Args:
            work: may run more than once.
            again: log message of a repetition.

        Raises:
            EngineError: the engine does not come back, or died ``ATTEMPTS`` times.
        """
        for _ in range(ATTEMPTS - 1):
            before = self._engine.restart_count
            try:
                return await work()
            except EngineError as error:
                # A request in flight may have seen to its restart.
                if not await self._engine.recover() and self._engine.restart_count == before:
                    raise
                log.warning("%s: %s", again, str(error).splitlines()[0])
        return await work()
