"""Server sockets of a broker, and limits on connections.

Sockets cost nothing to make, so a broker opens them before anything else: from then on no client is refused, and
connections wait until the rest is ready. A server has some thousand descriptors. Clients that open connections and
send slowly, or nothing, would otherwise keep all others out: when there is no room, the connection that has been
silent for longest makes it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.errors import BrokerError
from tandem.ports import http_url

if TYPE_CHECKING:
    from tandem.broker.server.app import BrokerServer

BACKLOG = 1024
"""Connections that may wait to be accepted: environments open a new one for every request."""
HELD = 3
"""Descriptor of a socket that systemd holds for us: then no client is refused even between two processes."""


def listening(host: str, port: int) -> Sequence[socket.socket]:
    """Sockets that take connections, one for each address of the host; port 0 is a free one.

    Raises:
        BrokerError: the address cannot be had.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return [socket.socket(fileno=HELD)]
    made: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in dict.fromkeys(addresses):
            at = (address[0], port or (made[0].getsockname()[1] if made else 0), *address[2:])
            made.append(socket.create_server(at, family=family, backlog=BACKLOG))
    except (OSError, UnicodeError) as error:  # a name that cannot be one, such as a..b, is the latter
        for one in made:
            one.close()
        raise BrokerError(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from error
    return made


OWN_DESCRIPTORS = 128
"""Descriptors that connections leave to files and to sockets that listen."""
MOST_DESCRIPTORS = 1 << 16
"""As many are asked of the system."""
PEER_SHARE = 0.75
"""Most of all connections that one address may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on the number of connections and on their idle time."""

    most: int
    """Connections at one time."""
    of_peer: int
    """Connections of one address at one time."""
    header_seconds: float = 10.0
    """From the connection to the end of the first request's headers."""
    idle_seconds: float = 5.0
    """A connection that has been silent for so long may have to make room for another."""


def room() -> ConnectionLimits:
    """As much as the system's limit on descriptors allows, which is raised as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST_DESCRIPTORS if hard == unlimited else min(hard, MOST_DESCRIPTORS)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = max(16, (wanted if soft == unlimited else min(soft, MOST_DESCRIPTORS)) - OWN_DESCRIPTORS)
    return ConnectionLimits(most=most, of_peer=max(8, int(most * PEER_SHARE)))


class Gate:
    """Makes the protocol of each connection, behind a guard."""

    def __init__(self, make: Callable[[], Any], room: ConnectionLimits) -> None:
        """``make`` gives the protocol that serves a connection."""
        self.room = room
        """Bounds."""
        self.turned_away = 0
        """Connections closed because there was no room, or because nothing came."""
        self._make = make
        self._all: OrderedDict[_ConnectionGuard, None] = OrderedDict()
        self._of_peer: dict[str, OrderedDict[_ConnectionGuard, None]] = {}

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _ConnectionGuard(self, self._make())

    def enter(self, guard: _ConnectionGuard) -> bool:
        """Whether a connection may be there; one that was silent for longest may have to go."""
        mine = self._of_peer.setdefault(guard.peer, OrderedDict())
        fits = (len(mine) < self.room.of_peer or self._made_room(mine)) and (
            len(self._all) < self.room.most or self._made_room(self._all)
        )
        if fits:
            self._all[guard] = None
            self._of_peer.setdefault(guard.peer, OrderedDict())[guard] = None  # the last of them may just have left
        else:
            self.turned_away += 1
            self.leave(guard)
        return fits

    def heard(self, guard: _ConnectionGuard) -> None:
        """It said something."""
        if guard in self._all:
            self._all.move_to_end(guard)
            self._of_peer[guard.peer].move_to_end(guard)

    def leave(self, guard: _ConnectionGuard) -> None:
        """It is gone."""
        self._all.pop(guard, None)
        if guard.peer in self._of_peer:
            self._of_peer[guard.peer].pop(guard, None)
            self._forget(guard)

    def _forget(self, guard: _ConnectionGuard) -> None:
        if not self._of_peer[guard.peer]:
            del self._of_peer[guard.peer]

    def _made_room(self, those: OrderedDict[_ConnectionGuard, None]) -> bool:
        silent = next(iter(those))
        if silent.has_headers and silent.silent_for() < self.room.idle_seconds:
            return False
        silent.close()
        return True


class _ConnectionGuard(asyncio.Protocol):
    """Stands before the protocol of one connection, until it is closed."""

    def __init__(self, gate: Gate, inner: Any) -> None:
        self.peer = ""
        self.has_headers = False
        self._gate = gate
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._heard = self._loop.time()
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._served = False

    def silent_for(self) -> float:
        """Seconds since its last byte."""
        return self._loop.time() - self._heard

    def close(self) -> None:
        """End it at once."""
        self._gate.turned_away += 1
        self._gate.leave(self)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = str(address[0]) if isinstance(address, tuple) and address else ""
        if not self._gate.enter(self):
            self._transport.abort()
            return
        self._served = True
        self._timer = self._loop.call_later(self._gate.room.header_seconds, self.close)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self._gate.heard(self)
        if not self.has_headers:
            seen = self._tail + data
            self.has_headers = b"\r\n\r\n" in seen or b"\n\n" in seen
            self._tail = seen[-3:]
            if self.has_headers and self._timer is not None:
                self._timer.cancel()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        keeps_open: bool | None = self._inner.eof_received()
        return keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._gate.leave(self)
        if self._served:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


READ_BYTES = 1 << 20
"""How much of a body may lie unread before its client is held back."""


KEPT_SECONDS = 30.0
"""How long a connection is kept that asks nothing more."""


@asynccontextmanager
async def serving(
    broker: BrokerServer,
    host: str,
    port: int,
    sockets: Sequence[socket.socket] = (),
    limits: ConnectionLimits | None = None,
) -> AsyncIterator[str]:
    """Answer requests at an address; port 0 is a free one. Gives the URL.

    Args:
        broker: what answers.
        host: for the URL, and to listen at if there are no ``sockets``.
        port: the same.
        sockets: made beforehand by ``listening``.
        limits: bounds on connections; None: as the system's limit on descriptors allows.

    Raises:
        BrokerError: the address cannot be had.
    """
    from aiohttp import web  # loading it takes longer than making the sockets that are there first

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
        gate, loop = Gate(runner.server, limits or room()), asyncio.get_running_loop()
        own = sockets or listening(host, port)
        address = own[0].getsockname()
        for one in own:
            servers.append(await loop.create_server(gate, sock=one, backlog=BACKLOG))
        yield http_url(host, address[1])
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()
        broker.bodies.close()
