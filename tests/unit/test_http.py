"""The HTTP clients: no response, however it was compressed, fills the memory."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from tandem.engines.vllm.client.http import EngineServer
from tandem.errors import EngineError, TandemError
from tandem.http import MOST_BYTES, HttpClient, HttpError

BOMB = gzip.compress(bytes(1 << 20)) * (MOST_BYTES >> 20) * 2
"""Twice what may be read, in a thousandth of its size."""


async def client(url: str) -> None:
    http = HttpClient(url, kind="judge", most_bytes=4 << 20)
    try:
        await http.call("GET", "/bomb", None, {}, 60.0)
    finally:
        await http.close()


async def engine(url: str) -> None:
    server = EngineServer(url, "", control_seconds=60.0, request_seconds=60.0)
    try:
        await server.get("/bomb", dict)
    finally:
        await server.close()


@pytest.mark.parametrize(("ask", "kind", "most"), [(client, HttpError, 4), (engine, EngineError, 256)])
def test_a_response_is_read_up_to_a_bound(
    ask: Callable[[str], Awaitable[None]], kind: type[TandemError], most: int
) -> None:
    requests = 0

    async def bomb(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.Response(body=BOMB, headers={"Content-Encoding": "gzip"})

    async def go() -> None:
        app = web.Application()
        app.router.add_get("/bomb", bomb)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            await ask(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    with pytest.raises(kind, match=f"/bomb with more than the {most} MiB that a response may have"):
        asyncio.run(go())
    assert requests == 1, "asking again would bring the same"
