"""A pause that is taken back leaves an engine as it was found; the frontends are the real ones, vLLM is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_vllm import FakeClient, Models, install

from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.engines.vllm.client.http import EngineUnreachable
from tandem.engines.vllm.protocol import Refusal
from tandem.engines.vllm.server.frontend import Stopped
from tandem.engines.vllm.server.routes import _Live
from tandem.errors import EngineError


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


class Server:
    """An engine and the trainer's client of it, without the wire between."""

    def __init__(self) -> None:
        self.vllm = FakeClient()
        self._live = _Live(self.vllm, SimpleNamespace(openai_serving_models=Models()), None, None)
        self.front = self._live.frontend
        self.instance_id = self.front.id
        self.away = False

    async def info(self) -> Any:
        return await self._ask(self._live.info, None)

    async def post(self, path: str, body: Any = None) -> Any:
        route = self._live.routes[path]
        assert route.body is not None
        return await self._ask(route.handler, route.body() if body is None else body)

    async def _ask(self, handler: Callable[[Any], Awaitable[Any]], body: Any) -> Any:
        if self.away:
            raise EngineUnreachable("it does not answer")
        try:
            return await handler(body)
        except (Refusal, Stopped) as error:
            raise EngineError(str(error)) from error


def engine(*servers: Any, sleep: int = 0) -> VllmEngine:
    fleet: Any = SimpleNamespace(
        servers=servers, requirements=None, options=SimpleNamespace(pause_seconds=50.0, sleep=sleep)
    )
    return VllmEngine(fleet, context=64, ends=[])


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 20)

    asyncio.run(main())


async def taken_back(server: Any, times: int = 1) -> None:
    client = engine(server)
    for _ in range(times):
        await client.pause()
    await client.resume_unchanged("the trainer ended")


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_served_goes_on_under_its_version(times: int) -> None:
    async def work() -> None:
        server = Server()
        await server.front.set_version(7, "d")
        await taken_back(server, times=times)
        front = server.front
        assert (front.state, front.step, front.digest) == ("serving", 7, "d")
        assert front.lease._timer is None, "nobody stops it later"
        assert not server.vllm.paused

    run(work)


def test_one_whose_weights_were_in_doubt_gives_out_nothing_again() -> None:
    async def work() -> None:
        server = Server()
        await server.front.stop("half a publish")
        await taken_back(server)
        assert server.front.state == "stopped"
        assert server.front.reason == "the trainer ended"
        assert server.vllm.paused

    run(work)


def test_nobody_talks_a_stopped_engine_into_serving() -> None:
    """Not by a pause and its end: a stamp says whose its weights are."""

    async def work() -> None:
        server = Server()
        await server.front.stop("half a publish")
        await server.front.pause()
        with pytest.raises(EngineError, match="stamp them first"):
            await server.post("/bridge/resume")
        await server.post("/bridge/stamp", wire.SetVersion(step=3, digest="d"))
        await server.post("/bridge/resume")
        assert (server.front.state, server.front.step) == ("serving", 3)

    run(work)


def test_what_somebody_else_had_paused_is_left_to_them() -> None:
    async def work() -> None:
        server = Server()
        await server.front.pause()
        await taken_back(server)
        assert server.front.state == "paused"

    run(work)


def test_weights_that_are_being_proven_are_not_held_back_for_ever() -> None:
    """A way that never pauses had an engine prove its version that was stopped before."""

    async def work() -> None:
        server = Server()
        await server.front.stop("half a publish")
        async with server.front.proving():
            pass
        await engine(server).resume_unchanged("the proof failed")
        assert server.front.state == "stopped"

    run(work)


def test_one_that_never_stood_still_is_left_alone() -> None:
    async def work() -> None:
        server = Server()
        await engine(server).resume_unchanged("the trainer ended")
        assert server.front.state == "serving"
        assert server.front.generation == 0

    run(work)


def test_the_first_of_two_goes_on_where_the_second_did_not_answer() -> None:
    async def work() -> None:
        here, gone = Server(), Server()
        gone.away = True
        client = engine(gone, here)
        with pytest.raises(EngineUnreachable):
            await client.pause()
        assert here.front.state == "paused"
        await client.resume_unchanged("the trainer ended")
        assert here.front.state == "serving"

    run(work)


def test_a_pause_that_is_over_is_not_remembered() -> None:
    async def work() -> None:
        server: Any = Server()
        client = engine(server)
        client.fleet.ready, client.fleet.all = asyncio.Event(), lambda path: asyncio.gather(server.post(path))
        await client.pause()
        await client.resume()
        await server.front.pause()
        await client.resume_unchanged("the trainer ended")
        assert server.front.state == "paused", "that pause is another's"

    run(work)


@pytest.mark.parametrize("level", [1, 2])
def test_one_that_sleeps_is_woken_and_serves_if_it_kept_its_weights(level: int) -> None:
    async def work() -> None:
        server: Any = Server()
        await server.front.set_version(7, "d")
        client = engine(server, sleep=level)
        await client.pause()
        await server.post("/bridge/sleep", wire.Sleep(level=level))  # type: ignore[arg-type]
        await client.resume_unchanged("the trainer ended")
        assert server.vllm.asleep == [level, None]
        assert server.front.state == ("serving" if level == 1 else "stopped")

    run(work)
