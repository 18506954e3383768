"""Many answers by one request: each is there as soon as it can be, and fails or is taken back alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from support.fake_vllm import FakeClient, install, settle

from tandem.engines.vllm.client import waves as _vllm_wave
from tandem.engines.vllm.client.http import EngineCoreDied, EngineServer
from tandem.engines.vllm.client.waves import Waves
from tandem.engines.vllm.protocol import (
    Failed,
    Generate,
    Ids,
    Many,
    Sampled,
    SiblingRequests,
    completion_request,
    framed,
    frames,
)
from tandem.engines.vllm.server import many
from tandem.engines.vllm.server.routes import Routes
from tandem.errors import Deadline, EngineError
from tandem.observability import waits
from tandem.types import Sampling


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in ("TANDEM_API_KEY", "TANDEM_TRAINER"):
        monkeypatch.delenv(name, raising=False)


class Engine:
    """The routes over a fake of vLLM, behind a socket, and a client of theirs."""

    def __init__(self) -> None:
        self.vllm = FakeClient(counts=True)
        self.waves = Waves()
        self.paths: list[str] = []
        self.sent: list[bytes] = []
        self.server: Any = None
        self.routes = Routes(None)
        self._app = SimpleNamespace(state=SimpleNamespace(engine_client=self.vllm))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """From aiohttp to ASGI."""
        self.paths.append(request.path)
        body, response = await request.read(), web.StreamResponse()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.set_status(message["status"])
                await response.prepare(request)
            else:
                self.sent += [message["body"]] if message["body"] else []
                await response.write(message["body"])

        scope = {"type": "http", "method": request.method, "path": request.path, "headers": [], "app": self._app}
        await self.routes(scope, receive, send)
        return response

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Engine]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.server = EngineServer(f"http://127.0.0.1:{port}", "", control_seconds=5.0, request_seconds=5.0)
        try:
            yield self
        finally:
            await self.server.close()
            await runner.cleanup()

    def ask(
        self, prompt: Sequence[int] = (1, 2, 3), seed: int | None = None, tokens: int = 2, least: int = -1
    ) -> asyncio.Task[Sampled]:
        sampling = Sampling(max_tokens=tokens)
        request = completion_request(prompt, sampling, limit=40, ends=[], min_step=least)
        return asyncio.create_task(self.waves.answer(self.server, request, seed=seed))

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not true():
                await asyncio.sleep(0.005)

    async def with_vllm(self, requests: int) -> None:
        await self.until(lambda: len(self.vllm.requests) == requests)


def run(body: Callable[[Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), Engine().up() as engine:
            await body(engine)

    asyncio.run(main())


def test_answers_that_come_one_after_another_are_sent_together_and_the_last_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(many, "TICK", 1.0)

    async def body(e: Engine) -> None:
        some = [e.ask([1, 2, 3], seed, tokens=seed) for seed in (1, 2, 3, 4)]
        await e.with_vllm(4)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0 - loop.time() % 1.0)  # a tick begins
        for _ in range(3):
            await e.vllm.step()
            await asyncio.sleep(0.02)
        assert not e.sent
        await asyncio.gather(*some[:3])
        assert len(e.sent) == 1
        begun = loop.time()
        await e.vllm.step()
        await some[3]
        assert loop.time() - begun < 0.5, "nothing else is waited for"

    run(body)


def test_what_is_asked_in_one_turn_is_one_request_and_each_answer_its_own() -> None:
    async def body(e: Engine) -> None:
        some = [e.ask([1, 2, 3], seed) for seed in (7, 8, None)] + [e.ask([4, 5], 9, tokens=3)]
        await e.with_vllm(4)
        assert e.paths == ["/generate/many"]
        assert [r.params.seed for r in e.vllm.seen] == [7, 8, None, 9]
        assert [r.prompt["prompt_token_ids"] for r in e.vllm.seen] == [[1, 2, 3]] * 3 + [[4, 5]]
        assert [r.params.max_tokens for r in e.vllm.seen] == [2, 2, 2, 3]
        await e.vllm.step(2)
        first = await asyncio.gather(*some[:3])
        assert not some[3].done(), "what is there is given out though another answer takes longer"
        assert [(one.tokens, one.logprobs, one.versions, one.finish) for one in first] == [
            ((0, 0), (0.0, 0.0), [(-1, 2)], "length")
        ] * 3
        await e.vllm.step()
        assert (await some[3]).tokens == (0, 0, 0)

    run(body)


def test_a_large_wave_goes_in_parts_so_that_the_engine_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm_wave, "MOST", 4)

    async def body(e: Engine) -> None:
        some = [e.ask([1 + i // 5]) for i in range(10)]
        await e.with_vllm(10)
        assert e.paths == ["/generate/many"] * 3
        await e.vllm.step(2)
        await asyncio.gather(*some)

    run(body)


def test_an_answer_that_fails_is_the_only_one() -> None:
    async def body(e: Engine) -> None:
        good, bad, worse = e.ask([1]), e.ask([1000]), e.ask([1] * 100)
        await e.until(lambda: bad.done() and worse.done())
        with pytest.raises(EngineError, match=r"answers /generate with 400: .*out of vocabulary"):
            await bad
        with pytest.raises(EngineError, match=r"answers /generate with 400: .*longer than the engine"):
            await worse
        await e.vllm.step(2)
        assert (await good).tokens == (0, 0)

    run(body)


def test_parameters_that_vllm_refuses_cost_one_prompts_answers() -> None:
    async def body(e: Engine) -> None:
        request = Generate(prompt=Ids(prompt_token_ids=[1]), temperature=-1.0)
        bad = asyncio.create_task(e.waves.answer(e.server, request, seed=None))
        good = e.ask([1])
        with pytest.raises(EngineError, match=r"`float` >= 0.0 - at `\$.temperature`"):
            await bad
        await e.with_vllm(1)
        await e.vllm.step(2)
        await good

    run(body)


def test_an_answer_that_is_taken_back_ends_alone_and_the_last_one_ends_the_request() -> None:
    async def body(e: Engine) -> None:
        some = [e.ask() for _ in range(3)]
        await e.with_vllm(3)
        some[1].cancel()
        await e.with_vllm(2)
        assert e.paths == ["/generate/many", "/generate/take_back"]
        await e.vllm.step(2)
        assert (await some[0]).tokens == (await some[2]).tokens == (0, 0)
        more = [e.ask() for _ in range(2)]
        await e.with_vllm(2)
        for task in more:
            task.cancel()
        await e.with_vllm(0)
        assert e.vllm.aborted >= 3

    run(body)


def test_an_answer_given_up_before_it_was_asked_for_is_not() -> None:
    async def body(e: Engine) -> None:
        gone, stays = e.ask(), e.ask()
        await asyncio.sleep(0)
        gone.cancel()
        await e.with_vllm(1)
        await e.vllm.step(2)
        assert (await stays).tokens == (0, 0)
        await settle()
        assert len(e.vllm.seen) == 1

    run(body)


def test_each_answer_has_its_own_deadline_and_names_the_engine() -> None:
    async def body(e: Engine) -> None:
        e.server.request_seconds = 0.2
        late = e.ask()
        await asyncio.sleep(0)
        e.server.request_seconds = 5.0
        timely = e.ask()
        await e.with_vllm(2)
        assert [w.on for w in waits.current() if w.reason == "POST /generate"] == [e.server.name] * 2
        with pytest.raises(Deadline, match=r"for engine http://127.* \(POST /generate\), but the deadline is 0.2 s"):
            await late
        await e.with_vllm(1)
        await e.vllm.step(2)
        await timely

    run(body)


def test_a_stop_is_told_to_each_that_is_not_answered() -> None:
    async def body(e: Engine) -> None:
        short, long = e.ask(tokens=1), e.ask(tokens=9)
        await e.with_vllm(2)
        await e.vllm.step()
        await short
        live = e.routes._live
        assert live is not None
        await live.frontend.stop("weights in doubt")
        with pytest.raises(EngineError, match="503: the engine is stopped: weights in doubt"):
            await long
        await e.with_vllm(0)

    run(body)


def test_an_engine_that_has_died_behind_its_routes_is_told_from_a_refusal() -> None:
    async def body(e: Engine) -> None:
        async def dead(*args: Any, **more: Any) -> AsyncIterator[Any]:
            raise e.vllm.dead_error
            yield

        e.vllm.generate = dead  # type: ignore[assignment,method-assign]
        with pytest.raises(EngineCoreDied, match="503"):
            await e.ask()

    run(body)


def test_a_wave_of_nothing_and_texts_are_refused() -> None:
    async def body(e: Engine) -> None:
        for wave, why in (
            ({"id": "a", "prompts": []}, "no answer is asked for"),
            ({"id": "a", "prompts": [{"asked": {}, "m": 1, "seeds": [None]}]}, "unknown field"),
        ):
            with pytest.raises(EngineError, match=f"answers /generate/many with 400: .*{why}"):
                await e.server.many("/generate/many", lambda sent=wave: msgspec.json.encode(sent), lambda piece: None)
        wave = Many(id="a", prompts=[SiblingRequests(request=msgspec.Raw(b'{"prompt": "text"}'), seeds=[None, None])])
        received = bytearray()
        await e.server.many("/generate/many", lambda: msgspec.json.encode(wave), received.extend)
        assert [(one.number, one.status) for one in frames(received) if isinstance(one, Failed)] == [(0, 400), (1, 400)]

    run(body)


def test_frames_arrive_in_any_pieces() -> None:
    each = [
        Sampled(number=0, tokens=(1, 2), logprobs=(-0.5, -1e-9), versions=[(3, 2)], finish="stop", engine="e"),
        Failed(number=1, status=400, title="ValueError", detail="no"),
    ]
    whole, buffer, decoded = b"".join(map(framed, each)), bytearray(), []
    for byte in whole:
        buffer.append(byte)
        decoded += frames(buffer)
    assert decoded == each
    assert not buffer
    with pytest.raises(msgspec.DecodeError):
        list(frames(bytearray(b"\0\0\0\1x")))
