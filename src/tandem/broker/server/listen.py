"""Sockets to listen at, which cost nothing to make: a broker that starts has them before anything else.

From then on nobody is refused. Who connects waits until the rest is there, as in a queue before an opening door.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from tandem.errors import BrokerError

BACKLOG = 1024
"""Connections that may wait to be accepted: environments open a new one for every request."""
HELD = 3
"""Descriptor of a socket that systemd holds for us: then nobody is refused even between two processes."""


def listening(host: str, port: int) -> Sequence[socket.socket]:
    """Sockets that take connections, one for each address of the host; port 0 is a free one.

    Raises:
        BrokerError: the address cannot be had.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return [socket.socket(fileno=HELD)]
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in dict.fromkeys(found):
            at = (address[0], port or (made[0].getsockname()[1] if made else 0), *address[2:])
            made.append(socket.create_server(at, family=family, backlog=BACKLOG))
    except OSError as error:
        for one in made:
            one.close()
        raise BrokerError(f"cannot listen at {host}:{port}: {error}; choose another --port") from error
    return made
