"""Bodies that come in pieces: whole ones however slowly they come, and never more waiting than was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from brokers import Client, group, play

from tandem.broker.protocol.wire import write
from tandem.broker.server.bodies import INLINE_BYTES, Bodies, BodyLimits, RequestRejected

HEAD = "POST /scored_data HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


class Trickle:
    """A body of which a byte comes whenever the wait for its end was given up."""

    def __init__(self, left: int, broken: BaseException | None = None) -> None:
        self.left = left
        self.broken = broken
        self.total_bytes = 0
        self.content = self

    def is_eof(self) -> bool:
        return not self.left

    def exception(self) -> BaseException | None:
        return self.broken

    async def wait_eof(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if self.total_bytes < 3:
                self.left, self.total_bytes = self.left - 1, self.total_bytes + 1

    def read_nowait(self) -> bytes:
        return bytes(self.total_bytes)


@pytest.mark.parametrize(("left", "whole"), [(3, True), (4, False)])
def test_only_a_pause_ends_a_body(left: int, whole: bool) -> None:
    bodies = Bodies(BodyLimits(idle_seconds=0.001))
    request: Any = Trickle(left)
    try:
        if whole:
            assert asyncio.run(bodies._whole(request)) == bytes(3)
        else:
            with pytest.raises(RequestRejected, match="nothing of the body came"):
                asyncio.run(bodies._whole(request))
    finally:
        bodies.close()


def test_a_client_that_went_before_anybody_waited_is_not_waited_for() -> None:
    bodies = Bodies(BodyLimits(idle_seconds=0.001))
    request: Any = Trickle(1, ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError, match="gone"):
        asyncio.run(bodies._whole(request))
    bodies.close()


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
        assert client.broker.bodies.received == len(body)
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


def test_pieces_are_counted_as_they_come_and_so_is_what_gzip_makes() -> None:
    """Bodies that do not say how long they are, or how long they become, are within the bound of all all the same."""
    plain = write(group(1, images="x" * 3_000_000))

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(plain), 100_000):
            yield plain[start : start + 100_000]

    async def scene(client: Client) -> None:
        headers = {"Content-Type": "application/json"}
        async with client.session.post(client.url + "/scored_data", data=pieces(), headers=headers) as response:
            assert response.status == 503
            assert b"too many bodies" in await response.read()
        reply = await client.post("/scored_data", plain, zipped=True)
        assert (reply.status, b"too many bodies" in reply.body) == (503, True)
        small = write(group(1, images="x" * 1_200_000))
        for zipped in (True, False):
            assert (await client.call("POST", "/scored_data", small, zipped)).json == {"status": "received"}
        assert client.broker.bodies.pending == 0

    play(scene, limits=BodyLimits(pending_bytes=2_400_000, inflation=10_000))


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

    play(scene, limits=BodyLimits(slow_seconds=0.2))
