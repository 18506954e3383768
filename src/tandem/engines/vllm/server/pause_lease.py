"""How long an engine may stay paused, and who paused it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
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
        self._by = ""
        self._since = 0.0
        self._until = 0.0

    @property
    def runs(self) -> bool:
        """Somebody is expected back."""
        return self._timer is not None

    @property
    def told(self) -> dict[str, Any] | None:
        """Who paused the engine, since when (UTC) and for how many seconds more; None while nobody has."""
        if not self._since:
            return None
        left = round(max(0.0, self._until - time.time()), 1) if self.runs else None
        return {"by": self._by, "since": _utc(self._since), "seconds_left": left}

    def renew(self, seconds: float, by: str = "") -> None:
        """Stop the engine if nobody ends or renews this in time.

        Args:
            seconds: from now.
            by: who asks; by default who did before.
        """
        self.hold()
        loop, now = asyncio.get_running_loop(), time.time()
        self._since, self._until = self._since or now, now + seconds
        self._by = by or self._by or "somebody"
        reason = (
            f"paused at {_utc(self._since)} by {self._by}, last for {seconds:g} s, and never resumed; its trainer is "
            "gone. Publish again"
        )

        def late() -> None:
            self._stopping = loop.create_task(self._stop(reason))

        self._timer = loop.call_later(seconds, late)

    def hold(self) -> None:
        """It may take as long as it likes."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def end(self) -> None:
        """The pause is over."""
        self.hold()
        self._by, self._since = "", 0.0


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
