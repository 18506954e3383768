"""A broker that starts: who connects before it is ready waits and is answered."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tandem.errors import BrokerError, ConfigError
from tandem_broker.commands import serve
from tandem_broker.queue.store import GroupQueue
from tandem_broker.server.app import BrokerServer
from tandem_broker.server.serving import listening, serving


def test_who_connects_before_it_is_ready_is_answered() -> None:
    async def scene() -> bytes:
        sockets = listening("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*sockets[0].getsockname())
        writer.write(b"GET /info HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n")
        async with serving(BrokerServer(GroupQueue()), "127.0.0.1", 0, sockets):
            response = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return response

    assert b'{"batch_size":-1,"max_token_len":-1}' in asyncio.run(scene())


def test_every_address_of_a_name_has_the_same_port() -> None:
    made = listening("localhost", 0)
    assert len({one.getsockname()[1] for one in made}) == 1
    for one in made:
        one.close()


def test_an_address_that_cannot_be_had_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=f"cannot listen at 127.0.0.1:{port}.*another --host or --port"):
            listening("127.0.0.1", port)
    for host in ("no.such.host.invalid", "127.0..1"):
        with pytest.raises(BrokerError, match=f"cannot listen at {host}:0"):
            listening(host, 0)


def test_what_a_file_adds_around_a_key_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BROKER_KEY", "trains\n")
    monkeypatch.setenv("TANDEM_BROKER_ENV_KEY", "plays, strange\n")
    assert serve._keys() == ("trains", "plays, strange")
    monkeypatch.setenv("TANDEM_BROKER_KEY", "\n")
    with pytest.raises(ConfigError, match="TANDEM_BROKER_KEY holds nothing but blanks"):
        serve._keys()
