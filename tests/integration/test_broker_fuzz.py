"""Bodies, headers and bytes that nobody would send: never a 500, and the broker lives on."""

from __future__ import annotations

import asyncio
import gzip
import json
import random

import pytest
from support.brokers import Client, group, play, served
from support.odd_messages import BODIES, damaged, mutated
from support.tiers import long_but

from tandem_broker.server.bodies import Bodies

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
            for get in ("/batch", "/latest_example", "/status?detail=1"):
                reply = await client.get(get)
                assert reply.status == 200, (get, reply.body[:500])
        await still_works(client)

    play(scene, bodies=Bodies(body_bytes=300_000, seconds=1.0))


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
