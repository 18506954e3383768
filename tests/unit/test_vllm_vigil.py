"""Engines that die while nobody here asks them anything, while they start, or whose connections break."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from tandem.engines.base import EngineRequirements
from tandem.engines.vllm.client import fleet as vigil
from tandem.engines.vllm.client import http
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.engines.vllm.client.fleet import Fleet, Launch
from tandem.engines.vllm.client.http import AGAIN, EngineServer, EngineUnreachable
from tandem.engines.vllm.client.process import EngineProcess
from tandem.engines.vllm.spec import Vllm
from tandem.errors import EngineError
from tandem.ports import free_port


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "HEALTH_SECONDS", 0.01)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


class Answering:
    """An engine's HTTP, as far as it is asked here."""

    def __init__(self) -> None:
        self.port = free_port()
        self.engine = "first"
        self.cuts = 0
        self.paths: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        if self.cuts:
            self.cuts -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"engine": self.engine})

    @asynccontextmanager
    async def up(self) -> AsyncIterator[EngineServer]:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        server = EngineServer(f"http://127.0.0.1:{self.port}", "", control_seconds=5.0, request_seconds=5.0)
        server.instance_id = self.engine
        try:
            yield server
        finally:
            await server.close()
            await runner.cleanup()


def fleet(
    server: EngineServer,
    *,
    launch: Launch | None = None,
    requirements: EngineRequirements | None = None,
    restarts: int = 3,
    start_seconds: float = 20.0,
) -> Fleet:
    requirements = requirements or EngineRequirements(model="m", dtype="float32")
    return Fleet(
        [server], launch=launch, options=Vllm(restarts=restarts, start_seconds=start_seconds), requirements=requirements
    )


def test_weights_are_brought_to_an_engine_that_came_back_though_nobody_asks_it_for_anything() -> None:
    async def go() -> None:
        engine, published = Answering(), asyncio.Event()

        async def republish() -> None:
            one.servers[0].instance_id = engine.engine
            published.set()

        async with engine.up() as server:
            one = fleet(server)
            one.watch(republish)
            while len(engine.paths) < 5:
                await asyncio.sleep(0)
            assert not published.is_set(), "it is who it was"
            engine.engine = "second"
            await published.wait()
            await one.close()
            assert one.failure is None

    run(go())


def test_who_published_before_is_asked_for_nothing_any_more() -> None:
    """A link that has ended cannot bring weights: its trainer's thread is gone."""

    async def go() -> None:
        engine, published = Answering(), asyncio.Event()

        async def ended() -> None:
            raise AssertionError("it is another's engine now")

        async def republish() -> None:
            one.servers[0].instance_id = engine.engine
            published.set()

        async with engine.up() as server:
            one = fleet(server)
            one.watch(ended)
            await asyncio.sleep(0)
            one.watch(republish)
            engine.engine = "second"
            await published.wait()
            assert one.failure is None
            await one.close()

    run(go())


@asynccontextmanager
async def looked_at(engine: Answering, *others: EngineServer) -> AsyncIterator[tuple[Fleet, list[int]]]:
    """Servers whose first is away; with how often the weights were to be brought to them."""
    server = EngineServer(f"http://127.0.0.1:{engine.port}", "", control_seconds=5.0, request_seconds=5.0)
    server.instance_id = "first"
    one, published = fleet(server), list[int]()
    one.servers += others

    async def republish() -> None:
        published.append(len(published))

    one.watch(republish)
    try:
        yield one, published
    finally:
        await one.close()


def test_an_engine_that_is_away_is_left_alone_while_another_is_there() -> None:
    async def go() -> None:
        engine, other = Answering(), Answering()
        async with other.up() as server, looked_at(engine, server) as (one, published):
            while len(other.paths) < 10:
                await asyncio.sleep(0.01)
            assert not published
            engine.engine = "second"
            async with engine.up():
                while not published:
                    await asyncio.sleep(0.01)
            assert one.failure is None

    run(go())


@pytest.mark.slow
def test_all_of_them_that_others_run_are_not_waited_for_in_vain() -> None:
    """Who brings weights waits for one of them for as long as the recipe says, and then that is told."""

    async def go() -> None:
        server = EngineServer(f"http://127.0.0.1:{free_port()}", "", control_seconds=5.0, request_seconds=5.0)
        one = fleet(server, start_seconds=0.1)

        async def republish() -> None:
            await one.recover()

        one.watch(republish)
        while one.failure is None:
            await asyncio.sleep(0.01)
        assert "is it running?" in str(one.failure)
        assert "engine.start_seconds: 0.1" in str(one.failure)
        await one.close()

    run(go())


@pytest.mark.parametrize("hangs", [False, True], ids=["refused", "hanging"])
def test_one_of_ours_that_does_not_answer_is_dead_only_when_its_process_is(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is at once, even where a child of it keeps the socket and a question would wait for long."""
    monkeypatch.setattr(http, "LOOK_SECONDS", 0.01)
    alive = [True]
    process = SimpleNamespace(
        pid=1, alive=lambda: alive[0], killed=False, exit_reason=lambda: "ended", log_summary=lambda: "", stop=nothing
    )

    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and answers none
            port = mute.getsockname()[1] if hangs else free_port()
            server = EngineServer(f"http://127.0.0.1:{port}", "", control_seconds=5.0, request_seconds=5.0)
            server.process = process  # type: ignore[assignment]
            launch = Launch(command=lambda *_: [], environment=lambda *_: {}, trainer="", log=Path(), records=None)
            one, published = fleet(server, launch=launch), asyncio.Event()

            async def republish() -> None:
                published.set()

            one.watch(republish)
            await asyncio.sleep(0.1)
            assert not published.is_set()
            alive[0] = False
            await published.wait()
            await one.close()

    run(go())


async def nothing() -> None:
    """A process that was stopped already."""


def test_one_that_cannot_be_brought_back_is_told_to_whoever_samples() -> None:
    async def go() -> None:
        engine = Answering()

        async def republish() -> None:
            raise EngineError("three restarts were enough")

        async with engine.up() as server:
            one = fleet(server)
            one.ready.set()
            one.watch(republish)
            engine.engine = "second"
            while one.failure is None:
                await asyncio.sleep(0.01)
            assert "three restarts" in str(one.failure)
            await one.close()

    run(go())


@pytest.mark.parametrize("path", ["/bridge/probe", "/generate", "/health"])
def test_a_connection_that_breaks_is_made_again(path: str) -> None:
    async def go() -> None:
        engine = Answering()
        async with engine.up() as server:
            engine.cuts = AGAIN
            assert await server.post(path) == {"engine": "first"}
            engine.cuts = AGAIN + 1
            with pytest.raises(EngineUnreachable):
                await server.post(path)

    run(go())


@pytest.mark.parametrize("path", ["/nccl/receive", "/lora/load"])
def test_what_does_something_else_the_second_time_is_not_said_twice(path: str) -> None:
    async def go() -> None:
        engine = Answering()
        async with engine.up() as server:
            engine.cuts = 1
            with pytest.raises(EngineUnreachable):
                await server.post(path)
            assert engine.paths == [path]

    run(go())


STARTED = "import os, sys; open(sys.argv[1], 'a').write('x'); os.kill(os.getpid(), 9)"
FAILING = "import sys; open(sys.argv[1], 'a').write('x'); sys.exit(3)"


@pytest.mark.parametrize(("program", "starts"), [(STARTED, 3), (FAILING, 1)])
def test_one_that_somebody_kills_while_it_starts_is_started_again(tmp_path: Path, program: str, starts: int) -> None:
    async def go() -> None:
        marks, numbers = tmp_path / "starts", []

        def command(model: str, port: int, number: int) -> list[str]:
            numbers.append(number)
            return [sys.executable, "-c", program, str(marks)]

        launch = Launch(
            command=command,
            environment=lambda index, key: {},
            trainer="",
            log=tmp_path,
            records=None,
        )
        server = EngineServer(f"http://127.0.0.1:{free_port()}", "", control_seconds=5.0, request_seconds=5.0)
        one = fleet(server, launch=launch, restarts=2)
        with pytest.raises(EngineError, match="before it was healthy"):
            await one.start()
        assert len(marks.read_text()) == starts
        assert numbers == list(range(starts))
        await one.close()

    run(go())


STAYING = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


@pytest.mark.slow
def test_where_one_cannot_start_the_others_are_ended_and_none_is_started_again(tmp_path: Path) -> None:
    """Ended by a signal, as one that somebody kills: that is no reason to start it again."""
    starts: list[int] = []

    def command(model: str, port: int, number: int) -> list[str]:
        starts.append(number)
        return [sys.executable, "-c", STAYING if number else "import sys, time; time.sleep(0.5); sys.exit(3)"]

    async def go() -> None:
        before = asyncio.all_tasks()
        launch = Launch(
            command=command, environment=lambda *_: {}, trainer="", log=tmp_path / "logs", records=tmp_path / "records"
        )
        servers = [
            EngineServer(f"http://127.0.0.1:{free_port()}", "", control_seconds=5.0, request_seconds=5.0)
            for _ in range(2)
        ]
        requirements = EngineRequirements(model="m", dtype="float32")
        both = Fleet(servers, launch=launch, options=Vllm(replicas=2), requirements=requirements)
        with pytest.raises(EngineError, match="ended with exit code 3"):
            await both.start()
        assert asyncio.all_tasks() == before
        await both.close()
        assert (starts, len(both.dead())) == ([0, 1], 2)
        assert not list((tmp_path / "records").iterdir())

    run(go())


@pytest.mark.slow
def test_one_left_behind_that_takes_calls_and_answers_none_is_ended_and_another_started(tmp_path: Path) -> None:
    port = free_port()
    mute = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    left = EngineProcess.start([sys.executable, "-c", mute], os.environ, tmp_path / "left.log")
    left.record(f"http://127.0.0.1:{port}", "").write(tmp_path / "engine-0.json")
    starts = tmp_path / "starts"

    async def go() -> None:
        while not answers(port):
            await asyncio.sleep(0.05)
        launch = Launch(
            command=lambda *_: [sys.executable, "-c", FAILING, str(starts)],
            environment=lambda *_: {},
            trainer="1:1",
            log=tmp_path,
            records=tmp_path,
        )
        server = EngineServer(f"http://127.0.0.1:{free_port()}", "", control_seconds=5.0, request_seconds=5.0)
        requirements = EngineRequirements(model="m", dtype="float32")
        one = Fleet([server], launch=launch, options=Vllm(control_seconds=0.5), requirements=requirements)
        with pytest.raises(EngineError, match="ended with exit code 3"):
            await one.start()
        await one.close()

    try:
        run(go())
        assert (starts.read_text(), left.alive()) == ("x", False)
    finally:
        asyncio.run(left.stop())


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def test_no_two_starts_draw_the_same_numbers() -> None:
    def seed(number: int) -> str:
        command = Vllm().command(
            EngineRequirements(model="m", dtype="float32", seed=5), 64, model="m", port=1, number=number
        )
        return command[command.index("--seed") + 1]

    assert [seed(number) for number in (0, 1, 7)] == ["5", "6", "12"]


def test_a_checkpoint_that_was_pruned_since_is_not_what_an_engine_starts_on(tmp_path: Path) -> None:
    weights = tmp_path / "model"
    weights.mkdir()
    server = EngineServer("http://127.0.0.1:1", "", control_seconds=5.0, request_seconds=5.0)
    one = fleet(server, requirements=EngineRequirements(model="m", dtype="float32", weights=weights))
    assert one._loadable() == str(weights)
    weights.rmdir()
    assert one._loadable() == "m"
    one.model = str(tmp_path / "another")  # named by whoever relaunched it
    assert one._loadable() == one.model


def test_an_answer_just_before_a_recovery_ends_is_no_reason_to_give_up() -> None:
    """The engine is healthy again, and whoever started it has not said so yet."""

    class Starting:
        def __init__(self) -> None:
            self.ours, self.ready, self.lock = True, asyncio.Event(), asyncio.Lock()

        async def settled(self) -> None:
            async with self.lock:
                return

    class Alive:
        async def gone(self) -> bool:
            return False

    async def go() -> None:
        engine = SimpleNamespace(fleet=Starting(), restart_count=0)
        engine.fleet.ready.set()
        await engine.fleet.lock.acquire()
        revived = asyncio.ensure_future(VllmEngine._restarted(engine, Alive(), 0, 1))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not revived.done()
        engine.restart_count = 1
        engine.fleet.lock.release()
        assert await revived

    run(go())
