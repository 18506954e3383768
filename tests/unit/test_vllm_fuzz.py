"""Bodies that nobody would send, to every route of an engine: never a 500, nothing hangs, and it serves on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from support import odd_requests as odd
from support.fake_vllm import install
from unit.test_vllm_routes import Client

pytestmark = pytest.mark.slow

REQUESTS = 200
PATIENCE = 60.0
"""Seconds for one request; on a free machine the slowest takes a hundredth."""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in ("TANDEM_API_KEY", "TANDEM_TRAINER", "TANDEM_ADAPTER_FOLDERS"):
        monkeypatch.delenv(name, raising=False)


async def ask(c: Client, path: str, body: Any) -> Any:
    return await asyncio.wait_for(c.post(path, body), PATIENCE)


@pytest.mark.parametrize("seed", range(6))
def test_odd_requests(seed: int, long: bool) -> None:
    draw = random.Random(seed)

    async def body() -> None:
        c = Client(adapters=seed % 2 == 0)
        await c.get("/health")
        for _ in range(REQUESTS * (20 if long else 1)):
            path, raw = odd.request(draw, odd.OURS)
            if odd.controls(path) and draw.random() < 0.5:
                await ask(c, "/bridge/pause", {"seconds": 60})
            response = await ask(c, path, raw)
            assert response.status < 500, (path, raw[:500], response.raw[:500])
            if odd.controls(path):
                for restoring, content in odd.RESTORE:
                    back = await ask(c, restoring, content)
                    assert back.status == 200, (path, raw[:500], restoring, back.raw)
        assert (await ask(c, "/generate", {"prompt": "a", "max_tokens": 2})).json["token_ids"] == [[0, 0]]
        assert (c.front.state, c.front.places.running, c.front.places.waiting, c.vllm.requests) == ("serving", 0, 0, [])
        assert c.routes._live is not None
        assert not c.routes._live.many._live

    asyncio.run(body())
