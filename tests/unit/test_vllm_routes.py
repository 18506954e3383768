"""The engine's HTTP surface, spoken to in plain ASGI; vLLM behind it is a fake."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_vllm import LIMIT, FakeClient, Models, install, settle

from tandem.engines.vllm.server import asgi
from tandem.engines.vllm.server.adapters import FOLDERS, IN_PLACE_ID
from tandem.engines.vllm.server.routes import Routes


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in ("TANDEM_API_KEY", "TANDEM_TRAINER", FOLDERS):
        monkeypatch.delenv(name, raising=False)


class Answered:
    def __init__(self, messages: list[Any]):
        assert messages, "no answer was sent"
        self.status = messages[0]["status"]
        self.headers = dict(messages[0]["headers"])
        self.raw = b"".join(m.get("body", b"") for m in messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def detail(self) -> str:
        assert self.headers[b"content-type"] == b"application/problem+json"
        assert self.json["status"] == self.status
        return str(self.json["detail"])


class Client:
    """One client of the routes."""

    def __init__(self, *, adapters: bool = False, stock: Any = None):
        self.vllm = FakeClient(adapters=adapters)
        self.models = Models()
        self.passed: list[Any] = []
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=self.vllm, openai_serving_models=self.models))
        self.routes = Routes(stock or self._stock)
        self.key = ""

    async def _stock(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            self.passed.append((scope["type"], b""))
            return
        body = await asgi.read(receive) if scope["method"] == "POST" else b""
        self.passed.append((scope, body))
        await asgi.answer(send, {"stock": scope["path"]})

    def scope(self, method: str, path: str) -> Any:
        headers = [(b"content-length", b"7"), (b"x-own", b"kept")]
        if self.key:
            headers.append((b"authorization", f"Bearer {self.key}".encode()))
        return {"type": "http", "method": method, "path": path, "headers": headers, "app": self.app, "root_path": ""}

    async def begin(
        self, path: str, body: Any = None, *, method: str = "POST", gone: asyncio.Event | None = None
    ) -> Answered:
        sent: list[Any] = []
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        parts = [raw[:5], raw[5:]]

        async def receive() -> Any:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.routes(self.scope(method, path), receive, send)
        return Answered(sent)

    async def post(self, path: str, body: Any = None) -> Answered:
        """Ask, with the scheduler running."""
        task = asyncio.ensure_future(self.begin(path, body))
        while not task.done():
            await self.vllm.step()
        return task.result()

    async def get(self, path: str) -> Answered:
        return await self.begin(path, method="GET")

    @property
    def front(self) -> Any:
        assert self.routes._live is not None
        return self.routes._live.frontend


def run(body: Callable[[Client], Awaitable[None]], **more: Any) -> None:
    async def main() -> None:
        await asyncio.wait_for(body(Client(**more)), 20)

    asyncio.run(main())


def test_text_and_ids_are_answered_alike() -> None:
    async def body(c: Client) -> None:
        text = await c.post("/generate", {"prompt": "ab", "max_tokens": 2, "logprobs": 1})
        assert text.status == 200
        assert text.json == {
            "text": ["<0><0>"],
            "prompt": "ab",
            "finish_reasons": ["length"],
            "logprobs": [[[{"0": -0.0}], [{"0": -0.0}]]],
            "prompt_logprobs": None,
            "prompt_token_ids": [97, 98],
            "token_ids": [[0, 0]],
            "versions": [[[-1, 2]]],
            "engine": c.front.id,
            "cached": 0,
        }
        ids = await c.post("/generate", {"prompt": {"prompt_token_ids": [97, 98]}, "max_tokens": 2, "logprobs": 1})
        assert {**ids.json, "cached": 0} == text.json
        assert c.vllm.seen[0].params.logprobs == 0, "one mapping of one token, the sampled one"
        assert c.vllm.seen[0].params.flat_logprobs is True
        assert (await c.post("/generate", {"prompt": "ab", "max_tokens": 2})).json["logprobs"] is None

    run(body)


def test_more_is_answered_when_asked_for() -> None:
    async def body(c: Client) -> None:
        request = {"prompt": "abc", "max_tokens": 1, "n": 2, "prompt_logprobs": 0, "temperature": 0.5, "seed": 3}
        response = (await c.post("/generate", {**request, "logprobs": 5})).json
        assert len(response["text"]) == len(response["token_ids"]) == len(response["versions"]) == 2
        assert response["prompt_logprobs"] == [None, {"98": -0.0}, {"99": -0.0}]
        params = c.vllm.seen[0].params
        assert (params.n, params.temperature, params.seed, params.logprobs, params.prompt_logprobs) == (2, 0.5, 3, 5, 0)
        spare = (
            await c.post("/generate", {**request, "n": 1, "detokenize": False, "prompt": {"prompt_token_ids": [1]}})
        ).json
        assert (spare["prompt"], spare["logprobs"]) == ("", None)

    run(body)


BAD = [
    (b"{", 400, "truncated"),
    (b"\xff\xfe", 400, "not as expected"),
    ([], 400, "object"),
    ({}, 400, "prompt"),
    ({"prompt": 3}, 400, "$.prompt"),
    ({"prompt": "a", "max_tokns": 3}, 400, "max_tokns"),
    ({"prompt": "a", "max_tokens": "3"}, 400, "$.max_tokens"),
    ({"prompt": {"prompt_token_ids": ["a"]}}, 400, "prompt_token_ids[0]"),
    ({"prompt": {"ids": [1]}}, 400, "ids"),
    ({"prompt": ""}, 400, "empty"),
    ({"prompt": {"prompt_token_ids": []}}, 400, "empty"),
    ({"prompt": {"prompt_token_ids": [1000]}}, 400, "out of vocabulary"),
    ({"prompt": "a" * (LIMIT + 1)}, 400, "longer than"),
    ({"prompt": "a", "temperature": -1}, 400, "$.temperature"),
    ({"prompt": "a", "n": 0}, 400, "$.n"),
    ({"prompt": "a", "stream": True}, 400, "/v1/completions"),
    ({"prompt": "a", "adapter": "nobody"}, 404, "nobody"),
    *(
        ({"prompt": "a", name: 10**20}, 400, f"$.{name}")
        for name in ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
    ),
    ({"prompt": "a", "seed": -(2**63) - 1}, 400, "$.seed"),
    ({"prompt": "a", "stop_token_ids": [2**31]}, 400, "$.stop_token_ids[0]"),
    ({"prompt": "a", "stop_token_ids": [-1]}, 400, "$.stop_token_ids[0]"),
    (b"x" * 200, 413, "larger"),
]


@pytest.mark.parametrize(("content", "status", "says"), BAD)
def test_bad_requests_are_told_why(content: Any, status: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MOST", 150)

    async def body(c: Client) -> None:
        response = await c.post("/generate", content)
        assert (response.status, says in response.detail) == (status, True), response.raw
        assert c.front.places.running == 0

    run(body)


def test_every_body_of_ours_refuses_what_it_does_not_know() -> None:
    async def body(c: Client) -> None:
        await c.get("/health")
        assert c.routes._live is not None
        paths = [path for path, route in c.routes._live.routes.items() if route.method == "POST"]
        assert len(paths) > 14
        for path in paths:
            if path == "/nccl/stop_receiver":
                continue  # takes nothing
            response = await c.post(path, {"no such field": 1})
            assert response.status in (400, 409), path
        assert not c.vllm.calls, "nothing was done"

    run(body)


def test_another_method_is_told_the_right_one() -> None:
    async def body(c: Client) -> None:
        response = await c.get("/generate")
        assert response.status == 405
        assert "POST" in response.detail
        assert (await c.post("/health")).status == 405

    run(body)


def test_the_key_guards_all_but_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "secret")

    async def body(c: Client) -> None:
        for key in ("", "wrong", "secret2"):
            c.key = key
            for path in ("/v1/models", "/bridge/info", "/metrics", "/health/"):
                assert (await c.get(path)).status == 401
            assert (await c.begin("/generate", {"prompt": "a"})).status == 401
            assert "Authorization" in (await c.get("/v1/models")).detail
        assert not c.passed
        assert not c.vllm.seen
        c.key = ""
        assert (await c.get("/health")).status == 200
        c.key = "secret"
        assert (await c.get("/v1/models")).json == {"stock": "/v1/models"}
        assert (await c.get("/bridge/info")).status == 200

    run(body)


def test_the_key_guards_websockets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "secret")

    async def body(c: Client) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await c.routes({**c.scope("GET", "/v1/realtime"), "type": "websocket"}, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]
        assert not c.passed
        c.key = "secret"
        await c.routes({**c.scope("GET", "/v1/realtime"), "type": "websocket"}, receive, send)
        await c.routes({"type": "lifespan"}, receive, send)
        assert [kind for kind, _ in c.passed] == ["websocket", "lifespan"]

    run(body)


def test_before_the_engine_is_there_everything_is_503() -> None:
    async def body(c: Client) -> None:
        del c.app.state.engine_client
        assert (await c.get("/health")).status == 503
        assert "starting" in (await c.begin("/generate", {"prompt": "a"})).detail

    run(body)


def test_health_is_that_of_the_engine() -> None:
    async def body(c: Client) -> None:
        health = (await c.get("/health")).json
        assert (health["status"], health["state"], health["step"], health["running"]) == ("ok", "serving", -1, 0)
        c.vllm.dead = True
        assert (await c.get("/health")).status == 503

    run(body)


def test_a_control_message_ends_with_the_process_that_was_to_do_it() -> None:
    """vLLM never ends a call into a process that dies under it."""

    async def body(c: Client) -> None:
        c.vllm.answers["tandem_checksums"] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(c.post("/bridge/checksums", {"travels": "weights"}))
        await settle()
        assert not task.done()
        c.vllm.dead = True
        assert (await asyncio.wait_for(task, 5)).status == 503

    run(body)


def test_sums_that_come_with_a_probe_are_asked_for_once_the_scheduler_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that sums cannot sample, and a scheduler that stands still waits for it."""
    stood: list[bool] = []
    rpc = FakeClient.collective_rpc

    async def noted(self: FakeClient, method: str, args: tuple[Any, ...]) -> Any:
        stood.append(self.paused)
        return await rpc(self, method, args)

    async def body(c: Client) -> None:
        await c.post("/bridge/pause", {})
        monkeypatch.setattr(FakeClient, "collective_rpc", noted)
        async with c.front.proving():
            sums = asyncio.ensure_future(c.begin("/bridge/checksums", {"travels": "weights"}))
            await settle()
            assert stood == []
        assert (await sums).status == 200
        assert stood == [False]

    run(body)


@pytest.mark.parametrize("lent", [{"w": {}}, {"w": {}, "tandem.source.a": {}}], ids=["placed", "computed"])
@pytest.mark.parametrize("probed", [False, True])
def test_what_is_computed_of_lent_weights_is_before_sampling_goes_on(
    monkeypatch: pytest.MonkeyPatch, lent: dict[str, Any], probed: bool
) -> None:
    stood: list[bool] = []
    rpc = FakeClient.collective_rpc

    async def noted(self: FakeClient, method: str, args: tuple[Any, ...]) -> Any:
        if method == "tandem_derive":
            stood.append(self.paused)
        return await rpc(self, method, args)

    async def body(c: Client) -> None:
        monkeypatch.setattr(FakeClient, "collective_rpc", noted)
        c.vllm.answers["tandem_export_weights"] = [json.dumps({"lent": {"tensors": lent}, "map": {}})]
        await c.post("/bridge/pause", {})
        assert (await c.post("/bridge/lend", {})).status == 200
        if probed:
            async with c.front.proving():
                pass
        await c.post("/bridge/stamp", {"step": 1})
        assert (await c.post("/bridge/resume")).status == 200
        assert stood == [True] * (len(lent) - 1)

    run(body)


def test_a_client_that_goes_away_takes_its_work_along() -> None:
    async def body(c: Client) -> None:
        gone = asyncio.Event()
        task = asyncio.ensure_future(c.begin("/generate", {"prompt": "a", "max_tokens": 50}, gone=gone))
        await c.vllm.step(3)
        assert c.front.places.running == 1
        gone.set()
        with pytest.raises(AssertionError, match="no answer"):
            await task
        assert (c.front.places.running, c.vllm.aborted, c.vllm.requests) == (0, 1, [])

    run(body)


def test_a_control_message_is_done_though_its_client_went_away() -> None:
    """A trainer killed in the middle of a pause must not leave an engine that is paused for ever."""

    async def body(c: Client) -> None:
        gone = asyncio.Event()
        gone.set()
        response = await c.begin("/bridge/pause", {"seconds": 0.01}, gone=gone)
        assert response.json == {"state": "paused", "before": "serving"}
        await asyncio.sleep(0.05)
        assert (await c.get("/health")).status == 503
        assert "never resumed" in (await c.post("/generate", {"prompt": "a"})).detail

    run(body)


def test_a_stop_is_503_for_those_in_flight_and_for_new_ones_until_a_publish() -> None:
    async def body(c: Client) -> None:
        flying = asyncio.ensure_future(c.begin("/generate", {"prompt": "a", "max_tokens": 50}))
        await c.vllm.step(3)
        await c.post("/bridge/stop", {"reason": "bytes differ"})
        response = await flying
        assert (response.status, "bytes differ" in response.detail) == (503, True)
        assert (c.front.places.running, c.vllm.requests) == (0, [])
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            assert (await c.post(path, {"prompt": "a"})).status == 503
        assert (await c.get("/health")).status == 503
        assert (await c.post("/bridge/resume")).status == 503
        assert (await c.get("/bridge/info")).json["state"] == "stopped"
        await c.post("/bridge/pause")
        await c.post("/bridge/stamp", {"step": 3, "digest": "d"})
        assert (await c.post("/bridge/resume")).status == 200
        assert (await c.post("/generate", {"prompt": "a", "max_tokens": 2})).json["versions"] == [[[3, 2]]]
        info = (await c.get("/bridge/info")).json
        assert (info["state"], info["step"], info["digest"], info["updates"]) == ("serving", 3, "d", 1)

    run(body)


def test_an_update_may_be_notified_as_by_other_trainers() -> None:
    async def body(c: Client) -> None:
        assert (await c.post("/bridge/notify_update")).json == {"status": "ok", "step": 0, "updates": 1}
        assert (await c.post("/bridge/notify_update", {"step": 7})).json["step"] == 7
        assert (await c.post("/bridge/stamp", {})).status == 400
        assert (await c.post("/generate", {"prompt": "a", "max_tokens": 1})).json["versions"] == [[[7, 1]]]
        atropos = {"update_count": 9, "trainer_rank": 0, "timestamp": 1.5}
        assert (await c.post("/bridge/notify_update", atropos)).json == {"status": "ok", "step": 9, "updates": 3}
        assert (await c.post("/bridge/notify_update", {"step": 2, "update_count": 10})).json["step"] == 2
        assert (await c.post("/bridge/notify_update", {"update_count": 2**63})).status == 400
        assert (await c.post("/bridge/stamp", {"step": 3, **atropos})).status == 400

    run(body)


def test_weights_are_written_while_paused_alone() -> None:
    async def body(c: Client) -> None:
        for path, request in (
            ("/bridge/lend_slot", {"config": {}, "tensors": []}),
            ("/nccl/receive", {"manifest": [["w", [1], "float32"]]}),
        ):
            response = await c.post(path, request)
            assert (response.status, "pause" in response.detail) == (409, True)
        assert not c.vllm.calls

    run(body)


@pytest.mark.parametrize(("workers", "settled"), [(1, False), (2, True)])
def test_a_pause_of_several_workers_waits_for_the_devices_of_all(workers: int, settled: bool) -> None:
    async def body(c: Client) -> None:
        c.vllm.vllm_config.parallel_config.tensor_parallel_size = workers
        assert (await c.begin("/bridge/pause")).json == {"state": "paused", "before": "serving"}
        assert (("tandem_settle", ()) in c.vllm.calls) == settled

    run(body)


# Sleep


def test_an_engine_sleeps_while_paused_alone_and_wakes_up_paused() -> None:
    async def body(c: Client) -> None:
        response = await c.post("/bridge/sleep", {"level": 1})
        assert (response.status, "pause first" in response.detail) == (409, True)
        await c.post("/bridge/pause", {"finish": True})
        for _ in range(2):
            assert (await c.post("/bridge/sleep", {"level": 1})).json == {"level": 1}
        assert c.vllm.asleep == [1]
        for _ in range(2):
            assert (await c.post("/bridge/wake")).json == {"level": 0}
        assert c.vllm.asleep == [1, None]
        assert c.vllm.paused, "it goes on when its trainer says so"
        assert (await c.get("/bridge/info")).json["state"] == "paused"
        assert (await c.post("/bridge/resume")).status == 200  # its weights are those it had

    run(body)


def test_what_is_in_flight_keeps_an_engine_awake() -> None:
    async def body(c: Client) -> None:
        request = asyncio.ensure_future(c.begin("/generate", {"prompt": "a", "max_tokens": 3}))
        await c.vllm.step()
        await c.begin("/bridge/pause")
        response = await c.begin("/bridge/sleep", {"level": 2})
        assert (response.status, "1 requests are in flight" in response.detail) == (409, True)
        assert c.vllm.asleep == []
        await c.begin("/bridge/resume")
        await c.vllm.step(3)
        assert (await request).status == 200

    run(body)


def test_weights_that_a_deep_sleep_discarded_are_not_served_before_they_are_stamped() -> None:
    async def body(c: Client) -> None:
        await c.post("/bridge/pause")
        await c.post("/bridge/sleep", {"level": 2})
        await c.post("/bridge/wake")
        response = await c.post("/bridge/resume")
        assert (response.status, "stamp them first" in response.detail) == (409, True)
        await c.post("/bridge/stamp", {"step": 4, "digest": "d"})
        assert (await c.post("/bridge/resume")).json["step"] == 4

    run(body)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/bridge/resume", None),
        ("/bridge/checksums", {"travels": "weights"}),
        ("/bridge/probe", {"tokens": [1, 2]}),
        ("/bridge/lend", {}),
        ("/bridge/lend_slot", {"config": {}, "tensors": []}),
        ("/lora/load", {"adapter_name": "a", "adapter_path": "/x"}),
        ("/nccl/receive", {"manifest": [["w", [1], "float32"]]}),
    ],
)
def test_nothing_reads_or_writes_memory_that_was_released(path: str, content: Any) -> None:
    async def body(c: Client) -> None:
        await c.post("/bridge/pause")
        await c.post("/bridge/sleep", {"level": 1})
        before = list(c.vllm.calls)
        response = await c.begin(path, content)
        assert (response.status, "wake it first" in response.detail) == (409, True)
        assert c.vllm.calls == before
        assert c.vllm.paused

    run(body)


def test_who_sleeps_may_sleep_longer_than_a_pause_may_last() -> None:
    async def body(c: Client) -> None:
        await c.post("/bridge/pause", {"seconds": 500})
        await c.post("/bridge/sleep", {"level": 1})
        asleep = c.front.lease.report
        await c.post("/bridge/wake")
        awake = c.front.lease.report
        assert asleep is not None
        assert awake is not None
        assert (asleep["seconds_left"], awake["seconds_left"]) == (None, pytest.approx(500, abs=20))
        c.front.lease.end()

    run(body)


# vLLM's own routes


def test_stock_routes_pass_untouched() -> None:
    async def body(c: Client) -> None:
        assert (await c.get("/v1/models")).json == {"stock": "/v1/models"}
        raw = b'{"text":  "as it is"}'
        await c.post("/tokenize", raw)
        (scope, _), (_, content) = c.passed
        assert content == raw
        assert scope["headers"] == c.scope("GET", "")["headers"]

    run(body)


def test_stock_sampling_gets_the_salt_of_its_era() -> None:
    async def body(c: Client) -> None:
        await c.post("/v1/completions", {"prompt": "a"})
        first = c.front.salt
        await c.post("/bridge/pause")
        await c.post("/bridge/stamp", {"step": 1})
        await c.post("/bridge/resume")
        await c.post("/v1/chat/completions", {"messages": [], "cache_salt": "their/own" * 20})
        await c.post("/v1/completions", {"cache_salt": 3})
        (scope, one), (_, two), (_, three) = c.passed
        assert json.loads(one) == {"prompt": "a", "cache_salt": first}
        assert dict(scope["headers"]) == {b"x-own": b"kept", b"content-length": str(len(one)).encode()}
        theirs = json.loads(two)["cache_salt"]
        assert theirs.startswith(f"{c.front.salt}-"), "no prefix outlives its weights"
        assert len(theirs) <= 128
        assert not set(theirs) & set("@/\\\0"), "vLLM refuses these"
        assert first not in c.front.salt
        assert json.loads(three) == {"cache_salt": 3}, "vLLM says itself what is wrong"

    run(body)


def test_stock_answers_wait_for_the_proof_of_the_weights_they_are_from() -> None:
    go = asyncio.Event()

    async def stock(scope: Any, receive: Any, send: Any) -> None:
        await asgi.read(receive)
        await go.wait()
        await asgi.answer(send, "done")

    async def body(c: Client) -> None:
        task = asyncio.ensure_future(c.begin("/v1/completions", {"prompt": "a"}))
        await settle()
        assert c.front.places.running == 1
        await c.front.pause()
        async with c.front.proving():
            pass
        go.set()
        await settle()
        assert not task.done()
        await c.front.set_version(1, "")
        await c.front.resume()
        assert (await task).json == "done"
        assert c.front.places.running == 0

    run(body, stock=stock)


@pytest.mark.parametrize("streams", [False, True])
def test_stock_sampling_ends_with_a_stop(streams: bool) -> None:
    """vLLM aborts its work when its client goes away, so it is told that; ours is told 503, if it was told nothing."""
    ended: list[str] = []

    async def stock(scope: Any, receive: Any, send: Any) -> None:
        await asgi.read(receive)
        if streams:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        ended.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def body(c: Client) -> None:
        task = asyncio.ensure_future(c.begin("/v1/completions", {"prompt": "a"}))
        await settle()
        await c.front.pause()
        async with c.front.proving():
            pass
        await c.front.stop("torn")
        if streams:
            with pytest.raises(Exception, match="torn"):
                await task
        else:
            response = await task
            assert (response.status, "torn" in response.detail) == (503, True)
        assert ended == ["http.disconnect"]
        assert c.front.places.running == 0

    run(body, stock=stock)


def test_a_trainer_whose_proof_another_one_interrupts_is_told_which() -> None:
    async def body(c: Client) -> None:
        await c.post("/bridge/pause", {"by": "trainer (pid 7 on host)"})
        async with c.front.proving():
            task = asyncio.ensure_future(c.begin("/bridge/probe", {"tokens": [1, 2]}))
            await settle()
        await c.post("/bridge/pause", {"by": "trainer (pid 8 on host)"})
        response = await task
        assert response.status == 503
        assert "trainer (pid 8 on host)" in response.detail

    run(body)


def test_stock_sampling_queues_while_paused() -> None:
    async def body(c: Client) -> None:
        await c.post("/bridge/pause")
        task = asyncio.ensure_future(c.begin("/v1/completions", {"prompt": "a"}))
        await settle()
        assert not c.passed
        await c.post("/bridge/resume")
        assert (await task).status == 200

    run(body)


# Adapters


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_adapters_come_from_allowed_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, other = tmp_path / "allowed", adapter(tmp_path / "other")
    good = adapter(allowed / "good")
    (allowed / "link").symlink_to(other)
    (allowed / "inner").symlink_to(good)
    (adapter(allowed / "files") / "adapter_model.safetensors").symlink_to(other / "adapter_config.json")
    (allowed / "empty").mkdir()
    adapter(tmp_path / "allowed-too")
    adapter(allowed / "broken")
    monkeypatch.setenv(FOLDERS, os.pathsep.join([str(allowed), str(tmp_path / "none")]))

    async def body(c: Client) -> None:
        async def status(path: Any, route: str = "/lora/load", field: str = "adapter_path") -> int:
            return (await c.post(route, {field: str(path)})).status

        assert await status(good) == 200
        assert await status(allowed / "inner" / ".." / "good") == 409, "it is the one that is loaded already"
        for wrong in (other, allowed / ".." / "other", allowed / "link", allowed / "files", tmp_path / "allowed-too"):
            assert await status(wrong) == 403, wrong
            assert await status(wrong, "/v1/load_lora_adapter", "lora_path") == 403, wrong
        for wrong in ("/", "relative", "~", ""):
            assert await status(wrong) == 403, wrong
        assert await status(f"{allowed}/nu\0ll") == 400
        assert await status(allowed / "empty") == 404
        assert await status(allowed / "missing") == 404
        assert await status(allowed / "broken") == 400
        assert list(c.models.lora_requests) == ["good"]
        assert not c.passed
        assert await status(good, "/v1/load_lora_adapter", "lora_path") == 200

    run(body, adapters=True)


def test_adapters_are_loaded_used_and_unloaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    folder = str(adapter(tmp_path / "a"))

    async def body(c: Client) -> None:
        await c.post("/lora/load", {"adapter_path": folder, "adapter_name": "one"})
        assert (await c.post("/lora/load", {"adapter_path": folder, "adapter_name": "one"})).status == 409
        assert (await c.post("/lora/load", {"adapter_path": folder, "adapter_name": "tandem"})).status == 409
        status = (await c.get("/lora/status")).json
        assert (status["enabled"], status["served"], status["in_place"]) == (True, "one", False)
        assert status["loaded"] == [{"name": "one", "id": 1, "path": folder}]
        await c.post("/lora/load", {"adapter_path": folder, "adapter_name": "two"})
        await c.post("/bridge/stamp", {"step": 4, "adapter": "one"})
        await c.post("/generate", {"prompt": "a"})
        response = (await c.post("/generate", {"prompt": "a", "max_tokens": 1, "adapter": "two"})).json
        assert response["versions"] == [[[-1, 1]]], "two was never stamped"
        assert [request.adapter.lora_name for request in c.vllm.seen] == ["one", "two"]
        flying = asyncio.ensure_future(c.begin("/generate", {"prompt": "a", "max_tokens": 2}))
        while len(c.vllm.seen) < 3:
            await asyncio.sleep(0)
        await c.vllm.step()
        kept = await c.begin("/lora/unload", {"unless_used": True})
        assert kept.json["unloaded"] == ["two"]
        await c.vllm.step()
        assert (await flying).json["versions"] == [[[4, 2]]]
        assert (await c.post("/lora/unload", {"adapter_name": "one"})).json["unloaded"] == ["one"]
        assert c.vllm.removed == [2, 1]
        assert (await c.post("/lora/unload", {"adapter_name": "one"})).status == 404
        assert (await c.get("/lora/status")).json["served"] is None

    run(body, adapters=True)


def test_an_adapter_in_place_is_probed_before_it_is_served() -> None:
    async def body(c: Client) -> None:
        await c.post("/bridge/pause")
        c.vllm.answers["tandem_export_adapter"] = ['{"key": "abc"}']
        slot_config = {"config": {"r": 8}, "tensors": [["a", [8, 16], "bfloat16"]]}
        assert (await c.post("/bridge/lend_slot", slot_config)).json == {"ranks": [{"key": "abc"}]}
        arguments = (IN_PLACE_ID, '{"r": 8}', '[["a", [8, 16], "bfloat16"]]')
        assert c.vllm.calls[-1] == ("tandem_export_adapter", arguments)
        assert (await c.post("/bridge/resume")).status == 409, "nobody said what was written"
        await c.post("/bridge/probe", {"tokens": [1, 2]})
        assert {request.adapter.lora_name for request in c.vllm.seen} == {"tandem"}
        assert {request.params.seed for request in c.vllm.seen} == {None}, "vLLM on a CPU dies of part of a seeded one"
        await c.post("/bridge/stamp", {"step": 1})
        await c.post("/bridge/resume")
        await c.post("/generate", {"prompt": "a"})
        assert c.vllm.seen[-1].adapter.lora_name == "tandem"
        assert (await c.post("/lora/unload")).json["unloaded"] == ["tandem"]
        assert c.vllm.calls[-1] == ("tandem_forget", (IN_PLACE_ID,))
        await c.post("/generate", {"prompt": "a"})
        assert c.vllm.seen[-1].adapter is None

    run(body, adapters=True)


def test_without_lora_adapters_are_refused() -> None:
    async def body(c: Client) -> None:
        response = await c.post("/lora/load", {"adapter_path": "/x"})
        assert (response.status, "without adapters" in response.detail) == (409, True)
        assert (await c.get("/lora/status")).json["enabled"] is False

    run(body)


# The receiver


def start(**more: Any) -> dict[str, Any]:
    return {"init_method": "tcp://10.0.0.1:29500", "world_size": 2, **more}


def listed(**more: Any) -> dict[str, Any]:
    """What comes, as Atropos' example trainer announces it."""
    shapes, dtypes = {"w": [2, 3]}, {"w": "torch.float32"}
    return {"param_names": ["w"], "param_shapes": shapes, "param_dtypes": dtypes, "num_params": 1, **more}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (start(init_method="env://"), "tcp://host:port"),
        (start(backend="mpi"), "$.backend"),
        (start(world_size=1), "$.world_size"),
        (start(first_rank=0), "$.first_rank"),
        (start(param_metadata={"w": {"shape": "x", "dtype": "float32"}}), "shape"),
        (start(param_metadata=listed(param_names=["w", "v"], num_params=2)), "'v'"),
        (start(param_metadata=listed(param_dtypes={})), "'w'"),
        (start(param_metadata=listed(param_shapes=None)), "param_shapes"),
        (start(world_size=2**31), "$.world_size"),
        (start(world_size=1025), "$.world_size"),
        (start(first_rank=2**31, world_size=3), "$.first_rank"),
        (start(seconds=1e9), "$.seconds"),
        (start(name="x" * 5000), "$.name"),
        (start(param_metadata={"w": {"shape": [2**62], "dtype": "float32"}}), "shape"),
        (start(param_metadata={"w": {"shape": [1] * 9, "dtype": "float32"}}), "shape"),
        (start(param_metadata={"w": {"shape": [1], "dtype": "zeros"}}), "dtype"),
        (start(seconds=-3), "$.seconds"),
        (start(seconds=0), "$.seconds"),
        (start(init_method="tcp://10.0.0.1:0"), "tcp://host:port"),
    ],
)
def test_a_receiver_that_cannot_be_is_refused(content: Any, says: str) -> None:
    async def body(c: Client) -> None:
        response = await c.post("/nccl/start_receiver", content)
        assert (response.status, says in response.detail) == (400, True), response.raw
        assert "tandem_connect" not in [method for method, _ in c.vllm.calls]

    run(body)


@pytest.mark.parametrize("form", ["by name", "listed"])
def test_a_receiver_takes_what_was_announced(form: str) -> None:
    meta = listed() if form == "listed" else {"w": {"shape": [2, 3], "dtype": "torch.float32"}}

    async def body(c: Client) -> None:
        c.vllm.answers |= {"tandem_map": ['{"w": []}'], "tandem_connection": [{"state": "connected", "reason": ""}]}
        response = await c.post("/nccl/start_receiver", start(param_metadata=meta))
        assert response.json["status"] == "connected"
        await c.post("/bridge/pause")
        assert (await c.post("/nccl/receive", {})).json == {"status": "ok", "tensors": 1}
        method, (manifest, *_) = c.vllm.calls[-1]
        assert (method, json.loads(manifest)) == ("tandem_receive", [["w", [2, 3], "float32"]])
        assert (await c.post("/bridge/resume")).status == 409
        await c.post("/nccl/start_receiver", start())
        assert "manifest" in (await c.post("/nccl/receive", {})).detail

    run(body)


def test_what_was_received_is_sampled_from_at_once_and_given_out_once_it_is_proven() -> None:
    async def body(c: Client) -> None:
        c.vllm.answers["tandem_connection"] = [{"state": "connected", "reason": ""}]
        for step in (1, 2):
            await c.post("/bridge/pause")
            await c.post("/nccl/receive", {"manifest": [["w", [1], "float32"]], "verify": True})
            assert (await c.get("/health")).json["state"] == "proving"
            assert (await c.post("/bridge/resume")).status == 409
            await c.post("/bridge/stamp", {"step": step})
            assert (await c.post("/bridge/resume")).json["state"] == "serving"
        methods = [method for method, _ in c.vllm.calls]
        assert [methods.count(name) for name in ("tandem_connection", "tandem_receive")] == [1, 2]

    run(body)


def test_a_publish_that_breaks_off_stops_the_engine() -> None:
    async def body(c: Client) -> None:
        c.vllm.answers["tandem_receive"] = RuntimeError("peer closed the connection")
        c.vllm.answers["tandem_connection"] = [{"state": "connected", "reason": ""}]
        await c.post("/bridge/pause")
        response = await c.post("/nccl/receive", {"manifest": [["w", [1], "float32"]]})
        assert (response.status, "peer closed" in response.detail) == (500, True)
        assert "broke off" in (await c.post("/generate", {"prompt": "a"})).detail

    run(body)


# What the map looks like


def test_the_map_has_one_place_for_each_name() -> None:
    async def body(c: Client) -> None:
        place = {"vllm_name": "qkv", "shape": [1], "dtype": "float32", "device": "cpu"}
        c.vllm.answers["tandem_map"] = [json.dumps({"q": [place], "k": [place]})]
        mapping = (await c.get("/bridge/state_dict_info")).json
        assert mapping["param_names"] == ["k", "q"]
        assert mapping["param_mappings"] == {"q": place, "k": place}
        assert (mapping["num_params"], mapping["tp_degree"], mapping["ranks"][0]["q"]) == (2, 1, [place])

    run(body)


def test_a_trainer_that_is_no_process_cannot_adopt() -> None:
    async def body(c: Client) -> None:
        assert (await c.post("/bridge/adopt", {"trainer": "me"})).status == 400
        response = await c.post("/bridge/adopt", {"trainer": "12:34 boot"})
        assert (response.status, "watched" in response.detail) == (409, True)

    run(body)
