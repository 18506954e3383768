"""Engines at urls that die: the others take over, one that comes back is published to before it is sampled from."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tandem.engines.base import EngineRequirements
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client import fleet as _vllm_fleet
from tandem.engines.vllm.client import http as _vllm_client
from tandem.engines.vllm.client.engine import TRIES, VllmEngine
from tandem.engines.vllm.client.fleet import Fleet
from tandem.engines.vllm.client.http import EngineServer
from tandem.engines.vllm.protocol import Many, Sampled, framed
from tandem.engines.vllm.spec import Vllm
from tandem.errors import Deadline, EngineError, StaleWeights
from tandem.ports import free_port
from tandem.types import Completion, PolicyVersion, Sampling

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm_fleet, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(_vllm_fleet, "HEALTH_SECONDS", 0.01)
    monkeypatch.setattr(_vllm_client, "GONE_SECONDS", 0.0)


class Somebodys:
    """Somebody's engine: what it samples tells the version it was stamped with, or the boot it sampled before any."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.boots = 0
        self.context = 128
        self.num_requests = 0
        self.cut = 0
        self.logprob = -0.5
        self.gate = asyncio.Event()
        self.gate.set()
        self.in_doubt = asyncio.Event()
        self.info_gate = asyncio.Event()
        self.info_gate.set()
        self._runner: web.AppRunner | None = None

    async def up(self) -> None:
        self.boots += 1
        self.step, self.digest = -1, ""
        app = web.Application()
        app.add_routes(
            [
                web.get("/bridge/info", self._info),
                web.get("/health", self._health),
                web.get("/lora/status", self._lora),
                web.post("/generate/many", self._generate),
                web.post("/bridge/stamp", self._stamp),
                web.post("/bridge/resume", self._resume),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def down(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @property
    def instance_id(self) -> str:
        return f"boot {self.boots}"

    async def _info(self, request: web.Request) -> web.Response:
        await self.info_gate.wait()
        about = wire.EngineInfo(
            engine=self.instance_id, state="", reason="", step=self.step, digest=self.digest, updates=0, running=0,
            adapter=None, model="m", context=self.context, logprobs="processed_logprobs", adapters=False, workers=[],
        )  # fmt: skip
        return web.Response(body=msgspec.json.encode(about), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"running": 0, "waiting": 0})

    async def _lora(self, request: web.Request) -> web.Response:
        return web.json_response({"loaded": [], "in_place": None})

    async def _generate(self, request: web.Request) -> web.Response:
        wave = msgspec.json.decode(await request.read(), type=Many)
        answers = sum(len(siblings.seeds) for siblings in wave.prompts)
        self.num_requests += answers
        if self.in_doubt.is_set():
            document = {"status": 503, "title": "Stopped", "detail": "a publish broke off"}
            return web.json_response(document, status=503)
        self.least = wire.parsed(bytes(wave.prompts[0].request), wire.Generate).min_step
        if self.cut:
            self.cut -= 1
            assert request.transport is not None
            request.transport.close()
        await self.gate.wait()
        answer_frames = [
            framed(
                Sampled(
                    number,
                    tokens=(5,),
                    logprobs=(self.logprob,),
                    versions=[(self.step, 1)],
                    finish="stop",
                    engine=self.instance_id,
                )
            )
            for number in range(answers)
        ]
        return web.Response(body=b"".join(answer_frames))

    async def _stamp(self, request: web.Request) -> web.Response:
        version = msgspec.json.decode(await request.read(), type=wire.SetVersion)
        self.step, self.digest = version.step, version.digest
        return web.json_response({"engine": self.instance_id})

    async def _resume(self, request: web.Request) -> web.Response:
        self.in_doubt.clear()
        return web.json_response({"seconds": 0.0, "step": self.step, "digest": self.digest})


class Publisher:
    """As a link publishes: one at a time, anew where engines died under it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.step = 0
        self.served = -1
        self.lock = asyncio.Lock()
        self.to: list[list[str]] = []
        self.failing: Exception | None = None
        engine.on_restart(self.republish)

    async def commit(self, step: int) -> None:
        async with self.lock:
            self.step = step
            await self._persist()

    async def republish(self) -> None:
        async with self.lock:
            await self.engine.recover()
            if self.served != self.engine.restart_count:
                await self._persist()

    async def _persist(self) -> None:
        while True:
            if self.failing is not None:
                raise self.failing
            try:
                await self.engine.set_version(PolicyVersion(step=self.step, digest="d"))
                await self.engine.resume()
            except EngineError:
                if not await self.engine.recover():
                    raise
            else:
                self.served = self.engine.restart_count
                self.to.append([server.url for server in self.engine.servers])
                return


@asynccontextmanager
async def opened(*somebodys: Somebodys, seconds: float = 20.0) -> AsyncIterator[tuple[VllmEngine, Publisher]]:
    for each in somebodys:
        await each.up()
    urls = tuple(each.url for each in somebodys)
    spec = Vllm(urls=urls, start_seconds=seconds)
    requirements = EngineRequirements(model="m", dtype="bfloat16")
    servers = [EngineServer(url, "", control_seconds=5.0, request_seconds=5.0) for url in urls]
    fleet = Fleet(servers, launch=None, options=spec, requirements=requirements)
    engine = VllmEngine(fleet, context=64, ends=[1])
    try:
        await engine.start()
        publisher = Publisher(engine)
        await publisher.commit(1)
        yield engine, publisher
    finally:
        await engine.close()
        for each in somebodys:
            each.gate.set()
            await each.down()


async def sample(engine: VllmEngine) -> Completion:
    return await engine.generate([1, 2], Sampling(max_tokens=4), 0)


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(limited())


def test_a_logprob_that_is_no_number_is_told_with_its_token() -> None:
    async def go() -> None:
        one = Somebodys()
        async with opened(one) as (engine, _):
            one.logprob = -math.inf
            with pytest.raises(EngineError, match=r"logprob of token 1 of 1 \(id 5\) is -inf.*finish is stop"):
                await sample(engine)

    run(go)


def test_the_others_take_over_and_it_is_used_again_with_the_weights_of_now(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        one, two = Somebodys(), Somebodys()
        async with opened(one, two) as (engine, publisher):
            one.gate.clear()
            two.gate.clear()
            tasks = [asyncio.create_task(sample(engine)) for _ in range(6)]
            await until(lambda: (one.num_requests, two.num_requests) == (3, 3))
            two.gate.set()
            await one.down()
            assert [completion.versions for completion in await asyncio.gather(*tasks)] == [(1,)] * 6
            assert publisher.to == [[one.url, two.url], [two.url]]
            assert caplog.text.count("the other engines take over until it does") == 1
            await publisher.commit(2)
            assert publisher.to[-1] == [two.url]
            one.gate.set()
            await one.up()
            await until(lambda: len(engine.servers) == 2 and engine.fleet.ready.is_set())
            assert sorted(publisher.to[-1]) == sorted([one.url, two.url])
            before = one.num_requests
            completions = await asyncio.gather(*(sample(engine) for _ in range(4)))
            assert [completion.versions for completion in completions] == [(2,)] * 4
            assert one.num_requests == before + 2
            assert f"{one.url} answers again; publishing the current weights to it" in caplog.text

    run(go)


def test_requests_say_which_policy_step_they_are_for_and_no_older_one_is_taken() -> None:
    async def go() -> None:
        one = Somebodys()
        async with opened(one) as (engine, _):
            assert (await sample(engine)).versions == (1,)
            assert one.least == -1, "any will do"
            assert engine.accept_requests_for(1)
            assert (await sample(engine)).versions == (1,)
            assert one.least == 1
            assert engine.accept_requests_for(2)
            with pytest.raises(StaleWeights, match=f"{one.url} sampled before version 2 was published to it"):
                await sample(engine)

    run(go)


def test_a_request_for_a_policy_that_is_to_come_has_time_to_wait_for_the_trainer_as_well() -> None:
    async def go() -> None:
        one = Somebodys()
        async with opened(one) as (engine, publisher):
            one.gate.clear()
            engine.servers[0].request_seconds = 0.1
            with pytest.raises(Deadline):
                await sample(engine)
            engine.accept_requests_for(2)
            early = asyncio.create_task(sample(engine))
            await asyncio.sleep(0.4)
            assert not early.done()
            await publisher.commit(2)
            one.gate.set()
            assert (await early).versions == (2,)

    run(go)


def test_nobody_samples_from_it_before_it_is_published_to() -> None:
    async def go() -> None:
        one, two = Somebodys(), Somebodys()
        async with opened(one, two) as (engine, publisher):
            await one.down()
            await asyncio.gather(*(sample(engine) for _ in range(2)))
            before = one.num_requests
            async with publisher.lock:  # a step is being trained
                await one.up()
                for _ in range(5):
                    await asyncio.sleep(0.02)
                    assert (await sample(engine)).versions == (1,)
                assert one.num_requests == before
                assert len(engine.servers) == 1, "the servers of a publish do not change under it"
            await until(lambda: len(engine.servers) == 2)

    run(go)


def test_one_that_is_away_and_takes_calls_without_an_answer_is_still_away() -> None:
    async def go() -> None:
        one, two = Somebodys(), Somebodys()
        async with opened(one, two) as (engine, _):
            await two.down()
            await asyncio.gather(*(sample(engine) for _ in range(2)))
            engine.fleet._away[0]._control = 0.1
            two.info_gate.clear()
            await two.up()
            for _ in range(5):
                await asyncio.sleep(0.1)
                assert engine.failure is None
                assert (await sample(engine)).versions == (1,)
            two.info_gate.set()
            await until(lambda: len(engine.servers) == 2)

    run(go)


def test_a_death_in_the_midst_of_a_publish(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        one, two = Somebodys(), Somebodys()
        async with opened(one, two) as (engine, publisher):
            await two.down()
            await publisher.commit(2)
            assert publisher.to == [[one.url, two.url], [one.url]]
            assert (await sample(engine)).versions == (2,)

    run(go)


def test_one_that_stands_still_since_another_died_in_a_publish_is_asked_again() -> None:
    """It gives out nothing until that publish is repeated; where none is, it says why."""

    async def go() -> None:
        one, other = Somebodys(), Somebodys()
        async with opened(one, other) as (engine, publisher):
            engine.servers[1].outstanding = 100
            one.in_doubt.set()
            with pytest.raises(EngineError, match="a publish broke off"):
                await sample(engine)
            async with publisher.lock:
                waiting = asyncio.create_task(sample(engine))
                await until(lambda: one.num_requests > 1)
                await other.down()
                publisher.step = 2
                assert engine.servers[0].outstanding == 1, "what is asked of it counts"
                await publisher._persist()
            assert (await waiting).versions == (2,)
            assert [server.outstanding for server in engine.servers] == [0]

    run(go)


def test_the_only_one_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        one = Somebodys()
        async with opened(one) as (engine, publisher):
            await one.down()
            tasks = [asyncio.create_task(sample(engine)) for _ in range(3)]
            await until(lambda: "it is waited for" in caplog.text)
            assert not any(task.done() for task in tasks)
            await one.up()
            assert [completion.versions for completion in await asyncio.gather(*tasks)] == [(1,)] * 3
            assert publisher.to == [[one.url]] * 2
            assert f"engine {one.url} answers" in caplog.text

    run(go)
    assert caplog.text.count("it is waited for") == 1


def test_the_only_one_that_stays_away_ends_the_run() -> None:
    async def go() -> None:
        one = Somebodys()
        async with opened(one, seconds=0.05) as (engine, _):
            await one.down()
            with pytest.raises(EngineError, match=r"does not answer.*serve engine RECIPE \(engine.start_seconds: 0.05"):
                await sample(engine)

    run(go)


def test_all_that_stay_away_end_the_run_and_the_first_that_comes_is_enough() -> None:
    async def go() -> None:
        one, two = Somebodys(), Somebodys()
        async with opened(one, two) as (engine, publisher):
            await one.down()
            await two.down()
            completion = asyncio.create_task(sample(engine))
            await asyncio.sleep(0.05)
            await two.up()
            assert (await completion).versions == (1,)
            assert publisher.to[-1] == [two.url]
        async with opened(one, two, seconds=0.05) as (engine, _):
            await one.down()
            await two.down()
            with pytest.raises(EngineError, match="start_seconds"):
                await sample(engine)

    run(go)


def test_one_that_was_restarted_unseen_is_published_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is another than the one that was published to, though somebody answered whenever one asked."""
    monkeypatch.setattr(_vllm_fleet, "HEALTH_SECONDS", 60.0)  # else the watch may see it down, and publish once more

    async def go() -> None:
        one = Somebodys()
        async with opened(one) as (engine, publisher):
            await one.down()
            await one.up()
            assert (await sample(engine)).versions == (1,)
            await one.down()
            await one.up()
            await publisher.commit(2)
            assert (await sample(engine)).versions == (2,)
            assert len(publisher.to) == 3

    run(go)


def test_a_broken_connection_is_no_death() -> None:
    async def go() -> None:
        one = Somebodys()
        async with opened(one) as (engine, publisher):
            one.cut = TRIES - 1
            assert (await sample(engine)).versions == (1,)
            assert len(publisher.to) == 1
            one.cut = 100
            with pytest.raises(EngineError, match="does not answer /generate"):
                await sample(engine)

    run(go)


def test_one_that_comes_back_too_small_is_left_out_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        one, two = Somebodys(), Somebodys()
        async with opened(one, two) as (engine, _):
            await one.down()
            await asyncio.gather(*(sample(engine) for _ in range(2)))
            one.context = 32
            await one.up()
            await until(lambda: "takes 32 tokens and this run needs 64; it is left out" in caplog.text)
            await asyncio.sleep(0.05)
            assert (await sample(engine)).versions == (1,)
            assert len(engine.servers) == 1

    run(go)
    assert caplog.text.count("takes 32 tokens") == 1


def test_whoever_samples_is_told_that_one_could_not_be_published_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    async def go() -> None:
        one, two = Somebodys(), Somebodys()
        async with opened(one, two) as (engine, publisher):
            await one.down()
            await asyncio.gather(*(sample(engine) for _ in range(2)))
            publisher.failing = ValueError("it is not what it should be")
            await one.up()
            await until(lambda: engine.fleet.failure)
            with pytest.raises(ValueError, match="not what it should be"):
                await sample(engine)

    run(go)
