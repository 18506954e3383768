"""Bodies that come in pieces: whole ones however slowly they come, and never more waiting than was said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from brokers import Client, group, play

from tandem.broker._bodies import INLINE_BYTES, Answer, Bodies, Limits
from tandem.broker.wire import write

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
    bodies = Bodies(Limits(idle_seconds=0.001))
    request: Any = Trickle(left)
    try:
        if whole:
            assert asyncio.run(bodies._whole(request)) == bytes(3)
        else:
            with pytest.raises(Answer, match="nothing of the body came"):
                asyncio.run(bodies._whole(request))
    finally:
        bodies.close()


def test_a_client_that_went_before_anybody_waited_is_not_waited_for() -> None:
    bodies = Bodies(Limits(idle_seconds=0.001))
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
