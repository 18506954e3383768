"""Engines that died under a publish, or were started again since: what is repeated, bound again and proven anew."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tandem.engines.base import Engine
from tandem.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
"""How often one publish is tried where an engine dies under it."""


class Recovery:
    """Which start of an engine a session is bound to and has published to, and work repeated after a new start."""

    def __init__(self, engine: Engine) -> None:
        """Of an engine that nothing is bound to yet."""
        self._engine = engine
        self._bound = self._published = -1

    @property
    def is_bound(self) -> bool:
        """False where the engine was started again since it was bound: its storage is another."""
        return self._bound == self._engine.epoch

    @property
    def is_published(self) -> bool:
        """False where the engine was started again since the last publish: it serves what it was started on."""
        return self._published == self._engine.epoch

    def bound(self) -> None:
        """The engine, as it was started last, is bound."""
        self._bound = self._engine.epoch

    def published(self) -> None:
        """The engine, as it was started last, serves what was published."""
        self._bound = self._published = self._engine.epoch

    async def repeat(self, work: Callable[[], Awaitable[T]], again: str) -> T:
        """Do something with the engine, anew where it died under it and was started again.

        Args:
            work: may be done more than once.
            again: what the log says then.

        Raises:
            EngineError: the engine stays away, or died ``ATTEMPTS`` times.
        """
        for _ in range(ATTEMPTS - 1):
            before = self._engine.epoch
            try:
                return await work()
            except EngineError as error:
                # A request in flight may have seen to its restart.
                if not await self._engine.recover() and self._engine.epoch == before:
                    raise
                log.warning("%s: %s", again, str(error).splitlines()[0])
        return await work()
