"""A broker at an address: its sockets and connections."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from tandem.broker._listen import BACKLOG, listening
from tandem.broker.app import Broker

READ_BYTES = 1 << 20
"""How much of a body may lie unread before its client is held back."""


@asynccontextmanager
async def serving(broker: Broker, host: str, port: int, sockets: Sequence[socket.socket] = ()) -> AsyncIterator[str]:
    """Answer requests at an address; port 0 is a free one. Gives the URL.

    Args:
        broker: what answers.
        host: for the URL, and to listen at if there are no ``sockets``.
        port: the same.
        sockets: made beforehand by ``listening``.

    Raises:
        BrokerError: the address cannot be had.
    """
    runner = web.AppRunner(
        broker.application(), access_log=None, auto_decompress=False, read_bufsize=READ_BYTES, shutdown_timeout=5.0
    )
    await runner.setup()
    try:
        for one in sockets or listening(host, port):
            await web.SockSite(runner, one, backlog=BACKLOG).start()
        found = runner.addresses[0]
        yield f"http://{f'[{host}]' if ':' in host else host}:{found[1]}"
    finally:
        await runner.cleanup()
        broker.bodies.close()
