"""The broker's sockets: who is slow, silent or too many keeps nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tandem.errors import BrokerError
from tandem_broker.queue.store import GroupQueue
from tandem_broker.server.app import BrokerServer
from tandem_broker.server.serving import ConnectionLimits, serving

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def played(scene: Callable[[str], Awaitable[None]], **space: Any) -> None:
    async def go() -> None:
        async with serving(BrokerServer(GroupQueue()), "127.0.0.1", 0, limits=ConnectionLimits(**space)) as url:
            await asyncio.wait_for(scene(url), 60)

    asyncio.run(go())


async def opened(url: str, sent: bytes = b"") -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came until the connection was closed."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""


async def status_of(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url + "/info") as response:
        return response.status


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /info HTTP/1.1\r\nHost: b\r\nX: "])
def test_slow_connections_keep_nobody_out(sent: bytes) -> None:
    async def scene(url: str) -> None:
        slow = [await opened(url, sent) for _ in range(60)]
        for _ in range(20):
            assert await status_of(url) == 200
        closed = [await ended(reader) for reader, _ in slow[:30]]
        assert closed == [b""] * 30
        for _, writer in slow:
            writer.close()

    played(scene, most=20, header_seconds=600.0)


def test_whoever_sends_no_headers_is_not_waited_for() -> None:
    async def scene(url: str) -> None:
        reader, writer = await opened(url, b"GET /info HTTP/1.1\r\n")
        assert await ended(reader) == b""
        writer.close()
        reader, writer = await opened(url, b"GET /info HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r")
        writer.write(b"\n")
        assert b"200 OK" in await ended(reader)
        writer.close()

    played(scene, most=20, header_seconds=0.5)


def test_a_connection_that_has_long_been_silent_makes_room() -> None:
    async def scene(url: str) -> None:
        held = [await opened(url, b"GET /info HTTP/1.1\r\nHost: b\r\n\r\n") for _ in range(4)]
        for reader, _ in held:
            assert b"200 OK" in await reader.readline()
        assert await status_of(url) == 200
        assert b"batch_size" in await ended(held[0][0])
        for _, writer in held:
            writer.close()

    played(scene, most=4, idle_seconds=0.0)


def test_connections_under_way_are_not_cut_off_for_new_ones() -> None:
    head = b"POST /scored_data HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"

    async def scene(url: str) -> None:
        busy = [await opened(url, head) for _ in range(4)]
        await asyncio.sleep(0.1)
        late, writer = await opened(url, head)
        assert await ended(late) == b""
        writer.close()
        for reader, writer in busy:
            writer.write(b"       }")
            assert b"422" in await reader.readline()
            writer.close()

    played(scene, most=4, idle_seconds=600.0)


def test_an_address_that_cannot_be_had_is_told_in_one_line() -> None:
    async def listen(host: str, port: int) -> None:
        with pytest.raises(BrokerError, match=f"cannot listen at {host}:{port}.*another --host or --port"):
            async with serving(BrokerServer(GroupQueue()), host, port):
                pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(listen("127.0.0.1", taken.getsockname()[1]))
    for host in ("no.such.host.invalid", "127.0..1"):
        asyncio.run(listen(host, 0))
