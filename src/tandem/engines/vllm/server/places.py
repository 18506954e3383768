"""Admission to vLLM's scheduler: a few requests fewer than it could run, so that a probe never queues.

A scheduler that is full begins what comes next when something ends, and what has waited longest goes first. A probe of
new weights would stand behind every request of a step, and the trainer with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

PROBES = 3
"""Places that are kept for a probe, whose questions are asked all at once."""


class Places:
    """Requests in flight: which are admitted, which wait, and which adapter samples each.

    Args:
        number: of answers at a time; a request for more has all places to itself.
    """

    def __init__(self, number: int):
        self.running = 0
        """Requests with vLLM."""
        self.waiting = 0
        """Requests that have no place yet."""
        self.users: Counter[str] = Counter()
        """Those of each adapter, by name; of none: the empty name."""
        self._number = number
        self._free = asyncio.Semaphore(number)
        self._turn = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def taken(self, answers: int) -> AsyncIterator[None]:
        """Within it so many places are the request's; first come, first served. For none nothing waits."""
        wanted, places = min(answers, self._number), 0
        try:
            if wanted:
                self.waiting += 1
                try:
                    async with self._turn:  # one request at a time, so that two do not wait for each other's places
                        while places < wanted:
                            await self._free.acquire()
                            places += 1
                finally:
                    self.waiting -= 1
            yield
        finally:
            for _ in range(places):
                self._free.release()

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
