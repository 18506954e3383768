"""Bodies that come in pieces: whole ones however slowly they come, and never more waiting than was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.brokers import Client, group, play

from tandem_broker.protocol.wire import write
from tandem_broker.server.bodies import INLINE_BYTES, Bodies

HEAD = "POST /scored_data HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


@pytest.mark.parametrize("length", [200, INLINE_BYTES - 1000, 3 * INLINE_BYTES])
def test_a_body_in_pieces_is_taken_whole(length: int) -> None:
    body = write(group(1, images="x" * length))

    async def scene(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
        writer.write(HEAD.format(len(body)).encode() + body[:10])
        for begin, end in ((10, 50), (50, len(body) // 2), (len(body) // 2, len(body))):
            await client.get("/info")  # answered meanwhile
            writer.write(body[begin:end])
            await writer.drain()
        assert b" 200 " in await reader.readline()
        writer.close()
        assert (await client.get("/latest_example")).json["images"] == "x" * length

    play(scene)


@pytest.mark.parametrize("length", [200, 3 * INLINE_BYTES])
def test_a_client_that_goes_within_a_body_leaves_nothing(length: int) -> None:
    async def scene(client: Client) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
        writer.write(HEAD.format(length).encode() + b"{")
        while not client.broker.bodies.pending:
            await client.get("/info")
        writer.transport.abort()
        while client.broker.bodies.pending:
            await client.get("/info")
        assert (await client.get("/status")).json["queue_size"] == 0

    play(scene)


def test_a_body_of_unknown_length_counts_as_the_longest() -> None:
    plain = write(group(1, images="x" * 1_200_000))

    async def pieces() -> AsyncIterator[bytes]:
        yield plain

    async def scene(client: Client) -> None:
        headers = {"Content-Type": "application/json"}
        async with client.session.post(client.url + "/scored_data", data=pieces(), headers=headers) as response:
            assert response.status == 503
            assert b"too many bodies" in await response.read()
        for zipped in (True, False):
            assert (await client.call("POST", "/scored_data", plain, zipped)).json == {"status": "received"}
        assert client.broker.bodies.pending == 0

    play(scene, bodies=Bodies(body_bytes=3_000_000, pending_bytes=2_400_000, inflation=10_000))


def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    async def scene(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
        writer.write(HEAD.format(3 * INLINE_BYTES).encode())
        answer = asyncio.ensure_future(reader.readline())
        while not answer.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        assert b" 408 " in answer.result()
        writer.close()

    play(scene, bodies=Bodies(seconds=0.2))
