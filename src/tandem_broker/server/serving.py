"""Listens for clients.

The sockets are opened before anything else, so that clients of a starting broker wait instead of being refused.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tandem.errors import BrokerError
from tandem.ports import http_url

if TYPE_CHECKING:
    from tandem_broker.server.app import BrokerServer

BACKLOG = 1024
"""Connections that may wait to be accepted: environments open a new one for every request."""
SYSTEMD_SOCKET = 3
"""Descriptor of a socket that systemd holds: then no client is refused even between two processes."""
READ_BYTES = 1 << 20
"""How much of a body may lie unread before its client is held back."""
KEEPALIVE_SECONDS = 30.0


def listening(host: str, port: int) -> Sequence[socket.socket]:
    """Open sockets for connections, one for each address of the host; port 0 is a free one.

    Raises:
        BrokerError: the address cannot be had.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return [socket.socket(fileno=SYSTEMD_SOCKET)]
    sockets: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in dict.fromkeys(addresses):
            at = (address[0], port or (sockets[0].getsockname()[1] if sockets else 0), *address[2:])
            sockets.append(socket.create_server(at, family=family, backlog=BACKLOG))
    except (OSError, UnicodeError) as error:  # a name that cannot be one, such as a..b, is the latter
        for opened in sockets:
            opened.close()
        raise BrokerError(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from error
    return sockets


@asynccontextmanager
async def serving(
    broker: BrokerServer, host: str, port: int, sockets: Sequence[socket.socket] = ()
) -> AsyncIterator[str]:
    """Answer requests at an address; port 0 is a free one. Gives the URL.

    Args:
        broker: what answers.
        host: for the URL, and to listen at if there are no ``sockets``.
        port: the same.
        sockets: opened beforehand by ``listening``.

    Raises:
        BrokerError: the address cannot be had.
    """
    from aiohttp import web  # loading it takes longer than opening the sockets

    runner = web.AppRunner(
        broker.application(),
        access_log=None,
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        shutdown_timeout=5.0,
        keepalive_timeout=KEEPALIVE_SECONDS,
    )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection has a descriptor
    await runner.setup()
    try:
        sockets = sockets or listening(host, port)
        address = sockets[0].getsockname()
        for opened in sockets:
            await web.SockSite(runner, opened, backlog=BACKLOG).start()
        yield http_url(host, address[1])
    finally:
        await runner.cleanup()
        broker.bodies.close()
