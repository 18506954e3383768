"""How long an engine may stay paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Lease:
    """Whoever paused the engine is to resume it in time: weights half written must not be served.

    Args:
        stop: stops the engine, for a reason that is told.
    """

    def __init__(self, stop: Callable[[str], Coroutine[Any, Any, None]]):
        self._stop = stop
        self._timer: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        """Somebody is expected back."""
        return self._timer is not None

    def renew(self, seconds: float) -> None:
        """Stop the engine if nobody ends or renews this in time."""
        self.end()
        loop = asyncio.get_running_loop()

        def late() -> None:
            reason = f"paused {seconds:g} s ago and never resumed; its trainer is gone. Publish again"
            self._stopping = loop.create_task(self._stop(reason))

        self._timer = loop.call_later(seconds, late)

    def end(self) -> None:
        """It may take as long as it likes, or is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
