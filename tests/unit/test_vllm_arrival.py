"""Engines that somebody else runs: one that is not there yet is waited for, and one that cannot be used is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tandem.engines.base import EngineRequirements, RankEngine
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client import fleet as _vllm_fleet
from tandem.engines.vllm.client.fleet import Fleet, Launch
from tandem.engines.vllm.client.http import EngineServer
from tandem.engines.vllm.spec import Vllm
from tandem.errors import EngineError
from tandem.ports import free_port


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm_fleet, "LOOK_SECONDS", 0.01)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def fleet(port: int, seconds: float = 20.0) -> Fleet:
    url = f"http://127.0.0.1:{port}"
    server = EngineServer(url, "", control_seconds=5.0, request_seconds=5.0)
    return Fleet(
        [server],
        launch=None,
        options=Vllm(urls=(url,), start_seconds=seconds),
        requirements=EngineRequirements(model="m", dtype="bfloat16"),
    )


@asynccontextmanager
async def serving(port: int, **changes: Any) -> AsyncIterator[None]:
    """Somebody's engine."""
    about: dict[str, Any] = {
        "engine": "e", "state": "", "reason": "", "step": 0, "digest": "", "updates": 0, "running": 0,
        "adapter": None, "model": "m", "context": 128, "logprobs": "processed_logprobs", "adapters": False,
        "workers": [],
        **changes,
    }  # fmt: skip

    async def info(request: web.Request) -> web.Response:
        if changes.get("engine") == "locked":
            return web.json_response({"detail": "this engine wants its API key"}, status=401)
        return web.Response(body=msgspec.json.encode(wire.EngineInfo(**about)), content_type="application/json")

    app = web.Application()
    if changes.get("engine") != "stock":
        app.router.add_get("/bridge/info", info)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


class OtherHosts:
    """A rank on another host, whose engine is at these ports, one after another."""

    def __init__(self, *ports: int, reattached: bool = False) -> None:
        self.ports, self.reattached = list(ports), reattached
        self.restarted: list[int] = []

    def _engine(self) -> RankEngine:
        return RankEngine(url=f"http://127.0.0.1:{self.ports.pop(0)}", key="secret", reattached=self.reattached)

    async def start_engines(self, requirements: EngineRequirements) -> list[RankEngine]:
        return [self._engine()]

    async def restart_engine(self, rank: int) -> RankEngine:
        self.restarted.append(rank)
        return self._engine()


def of_ranks(own: int, hosts: OtherHosts) -> Fleet:
    """The lead's servers; its own runs already."""

    class OwnRuns(Fleet):
        async def _begin(self, index: int) -> None:
            assert index == 0, "others are started by their ranks"

    servers = [EngineServer(f"http://127.0.0.1:{p}", "", control_seconds=5.0, request_seconds=5.0) for p in (own, 1)]
    return OwnRuns(
        servers,
        launch=Launch(command=lambda *_: [], environment=lambda *_: {}, trainer="", log=Path(), records=None),
        options=Vllm(replicas=2, restarts=1),
        requirements=EngineRequirements(model="m", dtype="bfloat16", hosts=hosts),
    )


@pytest.mark.slow
def test_a_rank_on_another_host_starts_its_engine_and_starts_it_again() -> None:
    own, first, second, third = (free_port() for _ in range(4))

    async def go() -> None:
        hosts = OtherHosts(first, second, third)
        engines = of_ranks(own, hosts)
        async with serving(own):
            async with serving(first):
                await engines.start()
                assert [server.url for server in engines.servers] == [f"http://127.0.0.1:{p}" for p in (own, first)]
                assert (engines.servers[1].key, engines.started_elsewhere) == ("secret", False)
                assert not await engines.recover()
            async with serving(second):
                assert await engines.recover()
                assert (engines.servers[1].url, engines.restart_count) == (f"http://127.0.0.1:{second}", 1)
            with pytest.raises(EngineError, match=r"does not answer, and engine.restarts allows 1 restarts"):
                await engines.recover()
            assert hosts.restarted == [1]
        await engines.close()

    run(go())


def test_an_engine_that_a_rank_has_found_is_published_to_anew() -> None:
    own, other = free_port(), free_port()

    async def go() -> None:
        engines = of_ranks(own, OtherHosts(other, reattached=True))
        async with serving(own), serving(other):
            await engines.start()
        assert engines.started_elsewhere
        await engines.close()

    run(go())


def test_the_trainer_knows_its_own_address_on_the_way_to_one() -> None:
    def address(url: str) -> str:
        return EngineServer(url, "", control_seconds=5.0, request_seconds=5.0).address()

    assert address("http://127.0.0.1:9") == "127.0.0.1"
    with pytest.raises(EngineError, match="cannot be connected to"):
        address("http://nowhere.invalid:9")


def test_one_that_comes_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    async def go() -> None:
        engines = fleet(port)
        starting = asyncio.create_task(engines.start())
        while "it is waited for" not in caplog.text:
            await asyncio.sleep(0.005)
        assert not starting.done()
        async with serving(port):
            await starting
            assert engines.context == 128
            await engines.close()

    run(go())
    assert caplog.text.count("is it running? Start one by: tandem serve engine RECIPE; it is waited for") == 1
    assert f"engine http://127.0.0.1:{port} answers" in caplog.text


def test_one_that_is_there_is_not_talked_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()

    async def go() -> None:
        async with serving(port):
            engines = fleet(port)
            await engines.start()
            await engines.close()

    run(go())
    assert caplog.text == ""


def test_one_that_never_comes_is_told_with_how_long_it_was_waited_for() -> None:
    async def go() -> None:
        engines = fleet(free_port(), seconds=0.02)
        try:
            await engines.start()
        finally:
            await engines.close()

    with pytest.raises(
        EngineError, match=r"does not answer.*tandem serve engine RECIPE \(engine.start_seconds: 0.02\)"
    ):
        run(go())


def test_one_that_cannot_be_used_is_not_waited_for() -> None:
    port = free_port()

    async def go(**changes: Any) -> None:
        async with serving(port, **changes):
            engines = fleet(port)
            try:
                await engines.start()
            finally:
                await engines.close()

    with pytest.raises(EngineError, match="need vLLM's server or Tandem's"):
        run(go(engine="stock"))
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        run(go(logprobs="raw_logprobs"))
    with pytest.raises(EngineError, match=r"wants its API key; engine.api_key_variable names .* holds it$"):
        run(go(engine="locked"))
