"""Admission to vLLM's scheduler: a few requests fewer than it could run, so that a probe never queues.

A scheduler that is full begins what comes next when something ends, and what has waited longest goes first. A probe of
new weights would stand behind every request of a step, and the trainer with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

PROBES = 3
"""Places that are kept for a probe, whose questions are asked all at once."""
AT_ONCE = 2
"""Requests that are handed in within one turn of the event loop: each takes it some tenths of a millisecond, and a
command of a publish several turns."""


class TurnLimiter:
    """Lets a few requests pass in each turn of the event loop, first come, first served.

    Hundreds that wait for the same weights would otherwise be handed in within one turn, and for as long as that takes
    no command of a publish is answered: the engine stands still for it.
    """

    def __init__(self) -> None:
        self._passed = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    async def passed(self) -> None:
        """Wait for one's turn."""
        if not self._queue and self._passed < AT_ONCE:
            self._pass_one()
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        await turn

    def _pass_one(self) -> None:
        if not self._passed:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._passed += 1

    def _begin_turn(self) -> None:
        self._passed = 0
        while self._queue and self._passed < AT_ONCE:
            turn = self._queue.popleft()
            if not turn.done():  # its request was given up
                turn.set_result(None)
                self._pass_one()


class Places:
    """Requests in flight: which are admitted, which wait, and which adapter samples each.

    Args:
        number: of answers at a time; a request for more has all places to itself.
    """

    def __init__(self, number: int):
        self.running = 0
        """Requests with vLLM."""
        self.users: Counter[str] = Counter()
        """Those of each adapter, by name; of none: the empty name."""
        self.turnstile = TurnLimiter()
        """What those go through that wait for the same weights."""
        self._all = self._free = number
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return sum(not turn.cancelled() for _, turn in self._queue)

    @contextlib.asynccontextmanager
    async def taken(self, answers: int) -> AsyncIterator[None]:
        """Within it so many places are one's own; first come, first served. For none nothing waits."""
        number = min(answers, self._all)
        if number and (self._queue or number > self._free):
            await self._turn(number)
        else:
            self._free -= number
        try:
            yield
        finally:
            self._give(number)

    async def _turn(self, number: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((number, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # Without a result nothing was given to it; what stood behind may fit now.
            self._give(0 if turn.cancelled() else number)
            raise

    def _give(self, number: int) -> None:
        self._free += number
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            number, turn = self._queue.popleft()
            if not turn.cancelled():
                self._free -= number
                turn.set_result(None)

    @contextlib.asynccontextmanager
    async def counted(self, adapter: Any = None) -> AsyncIterator[None]:
        """Around the life of one request with vLLM."""
        self.running += 1
        self._empty.clear()
        try:
            with self.using(adapter):
                yield
        finally:
            self.running -= 1
            if not self.running:
                self._empty.set()

    @contextlib.contextmanager
    def using(self, adapter: Any) -> Iterator[None]:
        """Around what an adapter must stay loaded for."""
        name = adapter.lora_name if adapter is not None else ""
        self.users[name] += 1
        try:
            yield
        finally:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name]

    async def empty(self) -> None:
        """Return once vLLM has no request."""
        while self.running:
            await self._empty.wait()
