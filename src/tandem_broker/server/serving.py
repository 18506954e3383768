"""Listens for clients, and bounds their connections.

When all connections are taken, the one that has been silent for longest makes room.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tandem.errors import BrokerError
from tandem.ports import http_url
from tandem_broker.server.app import BrokerServer

BACKLOG = 1024
"""Connections that may wait to be accepted: environments open a new one for every request."""
OTHER_DESCRIPTORS = 128
"""Descriptors that connections leave to files and listening sockets."""
MOST_DESCRIPTORS = 1 << 16
SYSTEMD_SOCKET = 3
"""Descriptor of a socket that systemd holds: then no client is refused even between two processes."""
READ_BYTES = 1 << 20
"""How much of a body may lie unread before its client is held back."""
KEEPALIVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on connections."""

    most: int
    """Connections at one time."""
    header_seconds: float = 10.0
    """From the connection to the end of the first request's headers."""
    idle_seconds: float = 5.0
    """A connection that has been silent for so long may have to make room for another."""


def descriptor_limits() -> ConnectionLimits:
    """Allow as many connections as the system has descriptors for, raising its limit as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ConnectionLimits(most=max(16, wanted - OTHER_DESCRIPTORS))


class _ConnectionGuard:
    """Stands before the protocol of one connection, until it is closed.

    ``guards`` are those of open connections, the one that has been silent for longest first.
    """

    def __init__(self, inner: Any, limits: ConnectionLimits, guards: OrderedDict[_ConnectionGuard, None]) -> None:
        self._inner = inner
        self._limits = limits
        self._guards = guards
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._has_headers = False
        self._head = b""
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        """What the guard doesn't look at goes straight to the protocol."""
        return getattr(self._inner, name)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        guards, limits = self._guards, self._limits
        if len(guards) >= limits.most:
            silent = next(iter(guards))
            if silent._has_headers and self._loop.time() - silent._heard < limits.idle_seconds:
                self._transport.abort()
                return
            silent._close()
        guards[self] = None
        self._timer = self._loop.call_later(limits.header_seconds, self._close)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self in self._guards:
            self._guards.move_to_end(self)
        if not self._has_headers:
            self._head = (self._head + data)[-3 - len(data) :]
            self._has_headers = b"\r\n\r\n" in self._head
            if self._has_headers and self._timer is not None:
                self._timer.cancel()
        self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guards.pop(self, None)
        if self._timer is not None:  # else it was never let in
            self._timer.cancel()
            self._inner.connection_lost(exc)

    def _close(self) -> None:
        self._guards.pop(self, None)
        self._transport.abort()


@asynccontextmanager
async def serving(
    broker: BrokerServer, host: str, port: int, limits: ConnectionLimits | None = None
) -> AsyncIterator[str]:
    """Answer requests at an address; port 0 is a free one. Gives the URL.

    Args:
        broker: what answers.
        host: for the URL, and to listen at where systemd holds no socket.
        port: the same.
        limits: bounds on connections; None: as the system's limit on descriptors allows.

    Raises:
        BrokerError: the address cannot be had.
    """
    runner = web.AppRunner(
        broker.application(),
        access_log=None,
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        shutdown_timeout=5.0,
        keepalive_timeout=KEEPALIVE_SECONDS,
    )
    await runner.setup()
    assert runner.server is not None
    serve, limits, loop = runner.server, limits or descriptor_limits(), asyncio.get_running_loop()
    guards: OrderedDict[_ConnectionGuard, None] = OrderedDict()

    def guarded() -> Any:
        return _ConnectionGuard(serve(), limits, guards)

    address: dict[str, Any] = {"host": host or None, "port": port}
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        address = {"sock": socket.socket(fileno=SYSTEMD_SOCKET)}
    server = None
    try:
        try:
            server = await loop.create_server(guarded, backlog=BACKLOG, **address)
        except (OSError, UnicodeError) as error:  # a name that cannot be one, such as a..b, is the latter
            raise BrokerError(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from error
        yield http_url(host, server.sockets[0].getsockname()[1])
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()
        broker.bodies.close()
