"""Taking over engines that others used: adapters in the way go, and what was in doubt stays so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tandem.engines.base import EngineRequirements, LoadsVersions
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.engines.vllm.client.http import EngineServer
from tandem.engines.vllm.spec import Vllm
from tandem.errors import EngineError
from tandem.ports import free_port

ABOUT = wire.EngineInfo(
    engine="", state="", reason="", step=0, digest="", updates=0, running=0, adapter=None, model="m", context=8,
    logprobs="processed_logprobs", adapters=False, workers=[],
)  # fmt: skip
LOADED = [{"name": "step-000003-ab"}, {"name": "mine"}]


class Somebodys:
    """An engine that notes what it is asked."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.state = "serving"
        self.refuses = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        if request.path == "/bridge/pause":
            before, self.state = self.state, "paused"
            return web.json_response({"before": before})
        if request.path == "/bridge/info":
            about = msgspec.structs.replace(ABOUT, state=self.state)
            return web.Response(body=msgspec.json.encode(about), content_type="application/json")
        if request.path == self.refuses:
            return web.json_response({"detail": "no"}, status=500)
        return web.json_response({"loaded": LOADED, "in_place": False})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[EngineServer]:
        app, port = web.Application(), free_port()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server = EngineServer(f"http://127.0.0.1:{port}", "", control_seconds=5.0, request_seconds=5.0)
        try:
            yield server
        finally:
            await server.close()
            await runner.cleanup()


def inherited(engine: Somebodys, requirements: EngineRequirements) -> list[str]:
    """The versions by name that it goes on with."""

    async def go() -> list[str]:
        async with engine.served() as server:
            fleet: Any = SimpleNamespace(servers=[server], requirements=requirements, options=Vllm())
            return await VllmEngine(fleet, context=8, ends=[])._without_adapters()

    return asyncio.run(asyncio.wait_for(go(), 20))


def requirements(**changes: Any) -> EngineRequirements:
    return EngineRequirements(model="m", dtype="bfloat16", **changes)


def test_versions_by_name_are_gone_on_with() -> None:
    assert inherited(Somebodys(), requirements(payload="adapter", capability=LoadsVersions)) == ["step-000003-ab"]


def test_adapters_in_the_way_of_whole_weights_are_unloaded_by_a_paused_engine() -> None:
    engine = Somebodys()
    assert inherited(engine, requirements()) == []
    assert engine.paths == ["/lora/status", "/bridge/pause", "/lora/unload", "/bridge/info", "/bridge/resume"]


def test_one_that_unloads_nothing_serves_on() -> None:
    engine = Somebodys()
    engine.refuses = "/lora/unload"
    with pytest.raises(EngineError, match="/lora/unload with 500"):
        inherited(engine, requirements())
    assert engine.paths[-1] == "/bridge/resume"


def test_one_whose_weights_were_in_doubt_is_stopped_again() -> None:
    engine = Somebodys()
    engine.state = "stopped"
    inherited(engine, requirements())
    assert engine.paths[-1] == "/bridge/stop"
    assert "/bridge/resume" not in engine.paths
