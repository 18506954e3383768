"""Bodies, headers and bytes that nobody would send: never a 500, and the broker lives on."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.brokers import Client, group, play, served
from support.odd_messages import BODIES, damaged, mutated
from support.tiers import examples, long_but

from tandem_broker.queue.store import GroupQueue
from tandem_broker.server.app import BrokerServer
from tandem_broker.server.bodies import BodyLimits

ROUTES = BrokerServer(GroupQueue()).application().router.routes()
PATHS = sorted((route.method, route.resource.canonical) for route in ROUTES if route.resource)
LIMITS = BodyLimits(body_bytes=300_000, idle_seconds=1.0)

FINE = {200, 400, 401, 403, 404, 405, 408, 413, 422, 429, 503}


async def still_works(client: Client) -> None:
    """After whatever happened, a run goes through."""
    await client.get("/reset_data")
    await client.begin(batch_size=4)
    number = await client.env()
    assert (await client.post("/scored_data", group(env_id=number))).json == {"status": "received"}
    groups = (await client.get("/batch")).json["batch"]
    assert [one["scores"] for one in groups] == [[0.0, 1.0, 2.0, 3.0]]
    assert client.broker.bodies.pending == 0


@pytest.mark.parametrize("seed", long_but(range(6), 0))
def test_mutated_messages(seed: int) -> None:
    draw = random.Random(seed)

    async def scene(client: Client) -> None:
        await client.begin()
        await client.env()
        for _ in range(300):
            (method, path), valid = draw.choice(list(BODIES.items()))
            value = mutated(valid, draw)
            headers = {}
            body = json.dumps(value).encode()
            if draw.random() < 0.4:
                body = damaged(body, draw)
            if draw.random() < 0.3:
                body, headers["Content_Encoding"] = gzip.compress(body), "gzip"
                if draw.random() < 0.4:
                    body = damaged(body, draw)
            reply = await client.call(method, path, body, **headers)
            assert reply.status in FINE, (method, path, value, reply.body[:500])
            for get in ("/batch", "/latest_example", "/status?detail=1", "/metrics"):
                reply = await client.get(get)
                assert reply.status == 200, (get, reply.body[:500])
        await still_works(client)

    play(scene, limits=LIMITS)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.binary(max_size=200), st.text(max_size=20)), max_size=12))
def test_raw_bytes(calls: list[tuple[tuple[str, str], bytes, str]]) -> None:
    async def scene(client: Client) -> None:
        for (method, path), body, text in calls:
            reply = await client.call(method, path, body or None)
            assert reply.status in FINE, (method, path, body)
            async with client.session.request(
                method, client.url + path, params={"lease": text, "policy": text}
            ) as response:
                assert response.status in FINE
        await still_works(client)

    play(scene, limits=LIMITS)


RAW: list[Callable[[], bytes]] = [
    lambda: b"\x00" * 500 + b"\r\n\r\n",
    lambda: b"GET / HTTP/9.9\r\n\r\n",
    lambda: b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    lambda: b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999999999\r\n\r\n",
    lambda: b"POST /scored_data HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    lambda: b"POST /scored_data HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n{}",
    lambda: b"GET /batch HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n",
    lambda: b"GET /batch?lease=" + b"9" * 4000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda: b"GET /%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda: b"GET /info HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    lambda: b"POST /ack HTTP/1.1\r\nHost: x\r\nContent-Type: \xff/;;=\r\nContent-Length: 2\r\n\r\n{}",
]


def test_what_is_hardly_http() -> None:
    async def scene(client: Client) -> None:
        for raw in RAW:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
            writer.write(raw())
            writer.write_eof()
            try:
                answer = await asyncio.wait_for(reader.read(2000), 10)
            except ConnectionError:
                answer = b""
            writer.close()
            assert not answer.startswith((b"HTTP/1.1 500", b"HTTP/1.0 500")), (raw()[:100], answer[:300])
        await still_works(client)

    play(scene, limits=LIMITS)


def test_a_large_body_does_not_hold_up_the_others() -> None:
    """While 40 MB are read and decoded, small calls are answered, however slow this machine is at it."""
    body = json.dumps(group(64, tokens=[[5] * 100_000] * 64, masks=[[-100] * 100_000] * 64)).encode()

    async def scene() -> None:
        async with served() as client:
            await client.begin(batch_size=64)
            sent = asyncio.create_task(client.post("/scored_data", body))
            answered = 0
            while not sent.done():
                assert (await client.get("/info")).status == 200
                answered += 1
            assert sent.result().json == {"status": "received"}
            assert answered > 5

    asyncio.run(scene())
