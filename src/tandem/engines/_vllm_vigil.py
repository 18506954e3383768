"""Looks whether engines are still who they were, also where others alone sample from them.

A run that takes its groups from a broker asks its engines for nothing between two publishes. One that died and came
back holds no weights of the run, what is sampled from it is too old to be trained on, and so no next publish would
ever come: somebody has to look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from tandem.engines._vllm_client import Server
from tandem.errors import Deadline, EngineError

log = logging.getLogger(__name__)

SECONDS = 2.0
"""Between two looks."""


class Watched(Protocol):
    """The servers of one policy."""

    servers: list[Server]
    ready: asyncio.Event
    failure: Exception | None

    def dead(self) -> list[int]:
        """Places of servers of ours whose process has ended."""
        ...


async def watch(fleet: Watched, republish: Callable[[], Awaitable[None]]) -> None:
    """For ever: have the weights brought to servers that lost them."""
    try:
        while True:
            await asyncio.sleep(SECONDS)
            if fleet.ready.is_set() and await _lost_weights(fleet):
                await republish()
    except Exception as error:  # whoever asks for tokens next is told, and who publishes next meets it too
        log.error("the engines cannot be brought back: %s", error)
        fleet.failure = error
        fleet.ready.set()


async def _lost_weights(fleet: Watched) -> bool:
    """True if a server of ours is dead, or another process answers than the one that was published to."""
    for server in fleet.servers:
        try:
            found = await server.get("/health", dict)
        except (EngineError, Deadline):
            continue  # away, or stopped for a reason of its own: nothing can be brought to it now
        if found.get("engine", server.boot) != server.boot:
            return True
    return bool(fleet.dead())
