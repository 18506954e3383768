"""The broker's sockets."""

from __future__ import annotations

import socket

import pytest

from tandem.errors import BrokerError
from tandem_broker.server.serving import listening


def test_an_address_that_cannot_be_had_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=f"cannot listen at 127.0.0.1:{port}.*another --host or --port"):
            listening("127.0.0.1", port)
    for host in ("no.such.host.invalid", "127.0..1"):
        with pytest.raises(BrokerError, match=f"cannot listen at {host}:0"):
            listening(host, 0)
