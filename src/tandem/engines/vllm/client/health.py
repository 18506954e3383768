"""Looks whether engines are still who they were, also where others alone sample from them.

A run that takes its groups from a broker asks its engines for nothing between two publishes. One that died and came
back holds no weights of the run, what is sampled from it is too old to be trained on, and so no next publish would
ever come: somebody has to look. Where it cannot be brought back, whoever waits for groups finds that in ``failure``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from tandem.engines.vllm.client.http import Server, Unreachable
from tandem.errors import Deadline, EngineError

log = logging.getLogger(__name__)

SECONDS = 2.0
"""Between two looks."""


class Watched(Protocol):
    """The servers of one policy."""

    servers: list[Server]
    ready: asyncio.Event
    failure: Exception | None

    @property
    def ours(self) -> bool:
        """True if they are ours to start and end."""
        ...

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
    except Exception as error:  # whoever asks for tokens or waits for groups is told, and who publishes meets it too
        log.error("the engines cannot be brought back: %s", error)
        fleet.failure = error
        fleet.ready.set()


async def _lost_weights(fleet: Watched) -> bool:
    """True if a server of ours is dead, or the answers say that weights are lost."""
    asking = asyncio.create_task(_answers_tell(fleet), name="whether engines are who they were")
    try:
        while not asking.done():
            # Looked at all the while: a process that it had started may keep its socket, where nobody answers any more.
            if fleet.dead():
                return True
            await asyncio.wait((asking,), timeout=SECONDS)
        return await asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _answers_tell(fleet: Watched) -> bool:
    """True if another process answers than the one that was published to, or none does.

    The last is for servers that others run: who brings them weights waits until one answers, and not for ever.
    """
    away = 0
    for server in fleet.servers:
        try:
            found = await server.get("/health", dict)
        except Unreachable:
            away += 1  # nothing can be brought to it now
            continue
        except (EngineError, Deadline):
            continue  # stopped for a reason of its own
        if found.get("engine", server.boot) != server.boot:
            return True
    return not fleet.ours and away == len(fleet.servers)
