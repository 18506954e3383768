"""A follower: connects to the lead and executes its commands until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tandem.distributed.channel import COMMANDS, NEXT_COMMAND, Channel
from tandem.distributed.children import lead_lost
from tandem.distributed.crew import meeting
from tandem.distributed.group import broke_off
from tandem.distributed.placement import Placement
from tandem.errors import RankError, message_of
from tandem.observability import trace, waits
from tandem.together import cancel, unless
from tandem.transport.rendezvous import Rendezvous, first_line, own_address, visit

WORD_SECONDS = 8.0
"""How long it waits for the lead's word on which rank is lost, which the lead may take some seconds to hear of."""

Handler = Callable[[Any], Awaitable[Any]]
"""Executes one kind of command on its body; what it returns is the reply."""


class Follower:
    """One follower's end."""

    def __init__(self, placement: Placement, rendezvous: Rendezvous, channel: Channel):
        self.placement, self.rendezvous = placement, rendezvous
        self._channel = channel
        self._doing = "nothing"

    @classmethod
    async def join(cls, placement: Placement, seconds: float) -> Follower:
        """Find the lead and connect to it.

        Raises:
            TransportError: it does not answer.
            RankError: it started this process, and is gone or stopped.
        """
        rendezvous = meeting(placement.master_addr, placement.master_port, placement.world_size, seconds)

        def find() -> int:
            own_address(rendezvous)  # which waits until the lead listens
            return int(visit(rendezvous).get("lead"))

        async def connect() -> Channel:
            port = await asyncio.to_thread(find)
            reader, writer = await asyncio.open_connection(placement.master_addr, port)
            channel = Channel(reader, writer)
            await channel.send({"rank": placement.rank, "host": socket.gethostname(), "pid": os.getpid()})
            return channel

        lost = asyncio.ensure_future(lead_lost(os.environ))
        try:
            if (channel := await unless(lost, connect())) is None:
                who = f"rank {placement.rank} on {socket.gethostname()}"
                raise RankError(f"{who} ends before it has connected, for it lost the lead, rank 0: {await lost}")
            return cls(placement, rendezvous, channel)
        finally:
            lost.cancel()

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Execute commands, one at a time, until the lead says that it ends.

        Raises:
            RankError: the lead is gone, or failed; or a collective broke off here, for another rank is gone.
        """
        commands: asyncio.Queue[Any] = asyncio.Queue()
        reading = asyncio.create_task(self._read(commands), name="commands of the lead")
        try:
            while True:
                async with waits.waiting(f"rank {self.placement.rank}", NEXT_COMMAND, on="rank 0"):
                    command, body = await self._unless_lost(commands.get(), reading)
                if command == "end":
                    if body is not None:
                        raise RankError(f"rank {self.placement.rank} ends, for the lead has ended: {body}")
                    return
                self._doing = command
                with trace.span(f"{COMMANDS}{command}"):
                    await self._channel.send(["done", await self._unless_lost(handlers[command](body), reading)])
                self._doing = "nothing"
        except RankError:
            raise
        except Exception as error:
            if not broke_off(error):
                await self._channel.send(["failed", message_of(error)])
                raise
            raise await self._without_another(error, reading) from error
        finally:
            await cancel(reading)
            self._channel.close()

    async def _without_another(self, error: Exception, reading: asyncio.Task[None]) -> RankError:
        """What ends this rank where a collective broke off: the lead knows, or learns, which rank is lost."""
        with contextlib.suppress(ConnectionError, OSError):  # it may be the lead that is gone
            await self._channel.send(["broke", message_of(error)])
        await asyncio.wait((reading,), timeout=WORD_SECONDS)
        lost = f"it lost the lead, rank 0: {reading.exception()}" if reading.done() else "the lead's output says which"
        return RankError(
            f"rank {self.placement.rank} on {socket.gethostname()} ends in command {self._doing!r}, for a collective "
            f"broke off, as it does where another rank is gone; {lost} ({first_line(error)})"
        )

    async def report(self, body: Any) -> None:
        """Send the lead something that is no command's reply; of what was begun in one and ended after it."""
        await self._channel.send(["report", body])

    async def fail(self, error: BaseException) -> None:
        """Tell the lead of an error outside of commands, which ends the run."""
        await self._channel.send(["failed", message_of(error)])

    async def _read(self, commands: asyncio.Queue[Any]) -> None:
        while True:
            message = await self._channel.receive()
            if message[0] == "end" and message[1] is not None and self._doing != "nothing":
                raise ConnectionError(f"it has ended: {message[1]}")  # what is under way would wait for it
            commands.put_nowait(message)

    async def _unless_lost(self, work: Any, reading: asyncio.Task[None]) -> Any:
        """Await ``work``, or give it up as soon as the lead is gone."""
        result = await unless(reading, work)
        if result is None and reading.done():
            where = f"{self.placement.master_addr}:{self.placement.master_port}"
            raise RankError(
                f"rank {self.placement.rank} on {socket.gethostname()} ends in command {self._doing!r}, for it "
                f"lost the lead, rank 0 at {where}: {reading.exception()}"
            )
        return result
