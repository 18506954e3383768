"""Pauses of live engines, which may be taken back: each is then left as it was found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from tandem.engines.vllm.client.http import Server, Unreachable
from tandem.engines.vllm.protocol import messages as wire
from tandem.errors import EngineError


class Pauses:
    """What each server did when it was first paused, until it is resumed or stopped."""

    def __init__(self) -> None:
        self._before: dict[str, str] = {}

    def over(self) -> None:
        """The servers were resumed or stopped."""
        self._before.clear()

    async def pause(self, servers: Sequence[Server], asked: wire.Pause) -> None:
        """Pause all of them; the first failure is raised when all have answered."""

        async def one(server: Server) -> None:  # noted at once, whatever becomes of the others
            answer = await server.post("/bridge/pause", asked)
            self._before.setdefault(server.boot, answer["before"])

        for error in await asyncio.gather(*map(one, servers), return_exceptions=True):
            if error is not None:
                raise error

    async def release(self, servers: Sequence[Server], reason: str, *, sleeps: int, seconds: float) -> None:
        """Take the pauses back, where nothing was written meanwhile.

        One that served goes on, one that was stopped is stopped again, and so is one in which weights are being proven.
        What somebody else had paused is left to them.

        Args:
            servers: paused or not.
            reason: said by those that are stopped.
            sleeps: above 0 for servers that may be asleep.
            seconds: that a server which wakes up may stay paused.
        """
        for server in servers:
            before = self._before.pop(server.boot, None)
            with contextlib.suppress(Unreachable):
                state = (await server.info()).state
                served = state == "paused" and before == "serving"
                if served and await _goes_on(server, wire.Wake(seconds=seconds) if sleeps else None):
                    continue
                if served or state == "proving" or (state == "paused" and before == "stopped"):
                    await server.post("/bridge/stop", wire.Stop(reason=reason))


async def _goes_on(server: Server, wake: wire.Wake | None) -> bool:
    """Whether it serves again; not if it has lost its weights in its sleep, or does not wake up."""
    try:
        if wake is not None:
            await server.post("/bridge/wake", wake)
        await server.post("/bridge/resume")
    except Unreachable:
        raise
    except EngineError:
        return False
    return True
