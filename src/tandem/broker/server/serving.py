"""A broker at an address: its sockets and connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from tandem.broker.server.app import Broker
from tandem.broker.server.gate import Gate, Room, room
from tandem.broker.server.listen import BACKLOG, listening

READ_BYTES = 1 << 20
"""How much of a body may lie unread before its client is held back."""


KEPT_SECONDS = 30.0
"""How long a connection is kept that asks nothing more."""


@asynccontextmanager
async def serving(
    broker: Broker, host: str, port: int, sockets: Sequence[socket.socket] = (), space: Room | None = None
) -> AsyncIterator[str]:
    """Answer requests at an address; port 0 is a free one. Gives the URL.

    Args:
        broker: what answers.
        host: for the URL, and to listen at if there are no ``sockets``.
        port: the same.
        sockets: made beforehand by ``listening``.
        space: bounds on connections; None: as the system's limit on descriptors allows.

    Raises:
        BrokerError: the address cannot be had.
    """
    runner = web.AppRunner(
        broker.application(),
        access_log=None,
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        shutdown_timeout=5.0,
        keepalive_timeout=KEPT_SECONDS,
    )
    await runner.setup()
    servers: list[asyncio.Server] = []
    try:
        assert runner.server is not None
        gate, loop = Gate(runner.server, space or room()), asyncio.get_running_loop()
        own = sockets or listening(host, port)
        found = own[0].getsockname()
        for one in own:
            servers.append(await loop.create_server(gate, sock=one, backlog=BACKLOG))
        yield f"http://{f'[{host}]' if ':' in host else host}:{found[1]}"
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()
        broker.bodies.close()
