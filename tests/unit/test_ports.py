"""A reserved port is given to nobody else, and the server that it is kept for binds it."""

from __future__ import annotations

import asyncio
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem.engines.vllm.spec import Vllm
from tandem.errors import ConfigError
from tandem.ports import free_port, reserve_port

SHARED = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def server(port: int, *options: int) -> socket.socket:
    """Listens there, as a server does that sets these options."""
    listener = socket.socket()
    for option in options:
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        raise
    listener.listen()
    return listener


def test_a_free_port_can_be_had() -> None:
    with HTTPServer(("127.0.0.1", port := free_port()), BaseHTTPRequestHandler) as listener:
        assert listener.server_port == port
        assert free_port() != port


@pytest.mark.parametrize("options", [SHARED[:1], SHARED], ids=["reuse address", "reuse port too, as vLLM may"])
def test_the_server_that_a_port_is_kept_for_binds_it_and_is_reached(options: tuple[int, ...]) -> None:
    with (
        reserve_port() as reserved,
        server(port := reserved.getsockname()[1], *options) as listener,
        socket.create_connection(("127.0.0.1", port), timeout=5) as caller,
        listener.accept()[0] as answerer,
    ):
        assert answerer.getpeername() == caller.getsockname()


def test_nothing_listens_at_a_reserved_port_and_no_stranger_binds_it() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(OSError, match="in use"):
            server(port)


def test_the_kernel_gives_no_reserved_port_away() -> None:
    """Of its 28,000 ports a hundred are kept: in 5,000 draws each would come up 18 times over."""
    kept = [reserve_port() for _ in range(100)]
    try:
        ports = {one.getsockname()[1] for one in kept}
        assert len(ports) == 100
        assert not ports & {free_port() for _ in range(5000)}
    finally:
        for one in kept:
            one.close()


def test_an_engine_keeps_its_port_until_it_is_closed() -> None:
    engine = Vllm()._server(0)
    port = int(engine.url.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        server(port)
    asyncio.run(engine.close())
    server(port).close()


def test_a_host_that_is_not_here_has_no_port() -> None:
    with pytest.raises(ConfigError, match=r"engine\.host: no port can be had at 192\.0\.2\.1"):
        Vllm(host="192.0.2.1")._server(0)
