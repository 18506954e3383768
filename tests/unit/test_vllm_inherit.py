"""Taking over engines that others used: one that goes away in the middle of it is waited for and looked at again."""

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
from tandem.engines.vllm.client.engine import INHERIT_TRIES, VllmEngine
from tandem.engines.vllm.client.http import EngineServer, EngineUnreachable
from tandem.engines.vllm.spec import Vllm
from tandem.errors import EngineError
from tandem.ports import free_port

ABOUT = wire.EngineInfo(
    engine="", state="", reason="", step=0, digest="", updates=0, running=0, adapter=None, model="m", context=8,
    logprobs="processed_logprobs", adapters=False, workers=[],
)  # fmt: skip
LOADED = [{"name": "step-000003-ab"}, {"name": "mine"}]


class Somebodys:
    """An engine that breaks off requests until it was looked for so many times, and notes the others."""

    def __init__(self, away: int = 0, in_place: bool = False):
        self.away, self.in_place = away, in_place
        self.paths: list[str] = []
        self.state = "serving"
        self.refuses = ""

    async def answer(self, request: web.Request) -> web.Response:
        if self.away:
            assert request.transport is not None
            request.transport.abort()
        self.paths.append(request.path)
        if request.path == "/bridge/pause":
            before, self.state = self.state, "paused"
            return web.json_response({"before": before})
        if request.path == "/bridge/info":
            about = msgspec.structs.replace(ABOUT, state=self.state)
            return web.Response(body=msgspec.json.encode(about), content_type="application/json")
        if request.path == self.refuses:
            return web.json_response({"detail": "no"}, status=500)
        return web.json_response({"loaded": LOADED, "in_place": self.in_place})

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


def inherited(engine: Somebodys, requirements: EngineRequirements) -> tuple[list[str], int, int]:
    """What it says, how often it was woken and how often it was looked for again."""
    woken, again = [], []

    class Woken(VllmEngine):
        async def wake(self) -> None:
            woken.append(1)

    async def look() -> None:
        again.append(1)
        engine.away -= 1

    async def go() -> list[str]:
        async with engine.served() as server:
            fleet: Any = SimpleNamespace(
                servers=[server], requirements=requirements, options=Vllm(), ours=False, start=look
            )
            return await Woken(fleet, context=8, ends=[]).inherit()

    return asyncio.run(asyncio.wait_for(go(), 20)), len(woken), len(again)


def requirements(**changes: Any) -> EngineRequirements:
    return EngineRequirements(model="m", dtype="bfloat16", **changes)


def test_it_goes_away_while_it_is_looked_at() -> None:
    engine = Somebodys(away=2)
    names, woken, again = inherited(engine, requirements(payload="adapter", capability=LoadsVersions))
    assert (names, woken, again) == (["step-000003-ab"], 3, 2)


def test_adapters_in_the_way_of_whole_weights_are_unloaded_by_a_paused_engine() -> None:
    engine = Somebodys(away=1)
    names, _, again = inherited(engine, requirements())
    assert (names, again) == ([], 1)
    expected = ["/lora/status", "/bridge/pause", "/lora/unload", "/bridge/info", "/bridge/resume"]
    assert engine.paths[-5:] == expected


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


def test_one_that_goes_each_time_ends_it() -> None:
    with pytest.raises(EngineUnreachable, match="/lora/status"):
        inherited(Somebodys(away=1000), requirements(payload="adapter", capability=LoadsVersions))


def test_its_last_chance_is_one_of_some() -> None:
    assert (
        inherited(Somebodys(away=INHERIT_TRIES - 1), requirements(payload="adapter", capability=LoadsVersions))[2]
        == INHERIT_TRIES - 1
    )
