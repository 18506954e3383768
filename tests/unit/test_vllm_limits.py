"""What no engine can be asked is refused at its door, before vLLM or a worker sees it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
from support.fake_vllm import LIMIT, VOCABULARY, install
from unit.test_vllm_routes import Client, run

from tandem.engines.vllm.server import routes as _vllm_routes
from tandem.engines.vllm.server.watch import TrainerWatch
from tandem.processes import identity

IDS = {"prompt_token_ids": [1, 2]}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in ("TANDEM_API_KEY", "TANDEM_TRAINER", "TANDEM_HOST"):
        monkeypatch.delenv(name, raising=False)


def deep(levels: int) -> bytes:
    return b'{"a":' + b"[" * levels + b"]" * levels + b"}"


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"n": 10**6}, "n"),
    ({"n": 2**63}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": LIMIT + 1}, "context"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**25}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"logprobs": 2**40}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 300}, "stop"),
    ({"stop_token_ids": [VOCABULARY]}, "vocabulary"),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids"),
]


@pytest.mark.parametrize(("odd", "says"), SAMPLING, ids=str)
def test_sampling_that_no_engine_does_is_refused(odd: dict[str, Any], says: str) -> None:
    async def body(c: Client) -> None:
        response = await c.post("/generate", {"prompt": IDS, **odd})
        assert (response.status, says in response.detail) == (400, True), response.raw
        many = {"id": "a", "prompts": [{"asked": {"prompt": IDS, **odd}, "seeds": [1]}]}
        response = await c.post("/generate/many", many)
        assert (response.status, says.encode() in response.raw) == (200, True), (
            response.raw
        )  # told in the frame of that answer
        assert not c.vllm.seen
        assert c.front.places.running == 0

    run(body)


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("/generate", {"prompt": {"prompt_token_ids": [VOCABULARY]}}, "vocabulary"),
        ("/generate", b'{"prompt": "a", "temperature": NaN}', "malformed"),
        ("/generate", b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        ("/generate", deep(100_000), "not as expected"),
        ("/bridge/probe", {"tokens": []}, "tokens"),
        ("/bridge/probe", {"tokens": [VOCABULARY]}, "vocabulary"),
        ("/bridge/probe", {"tokens": [1], "max_tokens": LIMIT + 1}, "context"),
        ("/bridge/pause", {"seconds": 1e300}, "seconds"),
        ("/bridge/pause", {"seconds": 0}, "seconds"),
        ("/bridge/stamp", {"step": 2**63}, "step"),
        ("/bridge/stamp", {"step": 1, "digest": "x" * 10_000}, "digest"),
        ("/bridge/lend", {"folder": "/etc"}, "folder"),
        ("/bridge/lend_slot", {"config": {}, "tensors": [], "folder": "/etc"}, "folder"),
        ("/bridge/lend_slot", {"config": {}, "tensors": [["a", [1], "zeros"]]}, "tensors"),
        ("/nccl/start_receiver", {"init_method": "tcp://a", "world_size": 2}, "host:port"),
        ("/nccl/start_receiver", {"init_method": "tcp://a:1", "world_size": 2, "param_metadata": {"w": 3}}, "$[...]"),
    ],
)
def test_bodies_beyond_every_range_are_refused(path: str, content: Any, says: str) -> None:
    async def body(c: Client) -> None:
        response = await c.post(path, content)
        assert (response.status, says in response.detail) == (400, True), response.raw[:500]
        assert not c.vllm.seen
        assert not c.vllm.calls

    run(body)


# Who joins what


def test_nothing_is_received_and_nothing_stopped_without_a_group() -> None:
    async def body(c: Client) -> None:
        await c.post("/bridge/pause")
        for manifest, status in (([["w", [1], "float32"]], 409), ([], 400)):
            response = await c.post("/nccl/receive", {"manifest": manifest})
            assert response.status == status, response.raw
        assert (await c.post("/bridge/resume")).status == 200

    run(body)


# Who may end it


def test_only_a_process_that_runs_adopts_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    me = identity(os.getpid())
    assert me is not None
    watch = TrainerWatch(f"{me.pid}:{me.started}", 300.0)
    monkeypatch.setattr(_vllm_routes.TrainerWatch, "begin", lambda: watch)
    over = subprocess.Popen([sys.executable, "-c", ""])
    gone = identity(over.pid)
    assert gone is not None
    over.wait()

    async def body(c: Client) -> None:
        for trainer in (f"{gone.pid}:{gone.started}", f"{me.pid}:0 another boot", "999999999:1 x"):
            response = await c.post("/bridge/adopt", {"trainer": trainer})
            assert (response.status, "started then" in response.detail) == (404, True)
            assert watch._trainer == f"{me.pid}:{me.started}"
        assert (await c.post("/bridge/adopt", {"trainer": f"{os.getppid()}:x"})).status == 404
        parent = identity(os.getppid())
        assert parent is not None
        assert (await c.post("/bridge/adopt", {"trainer": f"{parent.pid}:{parent.started}"})).status == 200
        assert watch._trainer == f"{parent.pid}:{parent.started}"

    run(body)


# Pages


PAGE = [
    [(b"host", b"127.0.0.1:8000"), (b"origin", b"http://evil.example")],
    [(b"host", b"evil.example")],
    [(b"host", b"127.0.0.1:8000"), (b"sec-fetch-site", b"cross-site")],
    [(b"host", b"127.0.0.1:8000"), (b"content-type", b"text/plain;charset=UTF-8")],
]


@pytest.mark.parametrize("headers", PAGE, ids=str)
def test_a_page_in_a_browser_does_nothing_to_an_engine_without_a_key(
    headers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(c: Client) -> None:
        scope = c.scope
        c.scope = lambda method, path: {**scope(method, path), "headers": headers}  # type: ignore[method-assign]
        for path in ("/bridge/pause", "/bridge/stop", "/generate", "/v1/completions", "/v1/load_lora_adapter"):
            response = await c.begin(path, {"prompt": "a", "reason": "a page"})
            assert (response.status, "key" in response.detail) == (403, True)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        if len(headers) < 2 or headers[1][0] != b"content-type":  # a handshake has none
            await c.routes({**c.scope("GET", "/v1/realtime"), "type": "websocket"}, receive, send)
            assert [message["type"] for message in sent] == ["websocket.close"]
        assert not c.passed
        monkeypatch.setenv("TANDEM_API_KEY", "secret")
        c.scope = lambda method, path: {  # type: ignore[method-assign]
            **scope(method, path),
            "headers": [*headers, (b"authorization", b"Bearer secret")],
        }
        assert (await c.begin("/bridge/pause")).status == 200, "whoever has the key may ask from anywhere"

    run(body)


def test_an_engine_is_known_by_the_name_it_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(c: Client) -> None:
        scope = c.scope
        c.scope = lambda method, path: {**scope(method, path), "headers": [(b"host", b"gpu.example.org:8000")]}  # type: ignore[method-assign]
        assert (await c.begin("/bridge/pause")).status == 403
        monkeypatch.setenv("TANDEM_HOST", "gpu.example.org")
        assert (await c.begin("/bridge/pause")).status == 200

    run(body)


# Who paused it


def test_health_says_who_paused_it_and_since_when() -> None:
    async def body(c: Client) -> None:
        scope = c.scope
        c.scope = lambda method, path: {**scope(method, path), "client": ("10.0.0.7", 4242)}  # type: ignore[method-assign]
        assert (await c.get("/health")).json["paused"] is None
        await c.begin("/bridge/pause", {"by": "trainer (pid 7 on host)", "seconds": 600})
        paused = (await c.get("/health")).json["paused"]
        assert paused["by"] == "trainer (pid 7 on host)"
        assert paused["since"].endswith(" UTC")
        assert 0 < paused["seconds_left"] <= 600
        await c.begin("/bridge/pause", {"seconds": 5})
        again = (await c.get("/health")).json["paused"]
        assert (again["since"], again["by"]) == (paused["since"], "somebody")
        await c.begin("/bridge/resume")
        assert (await c.get("/health")).json["paused"] is None
        await c.begin("/bridge/pause", {"seconds": 0.01, "by": "trainer (pid 7 on host)"})
        while c.front.state != "stopped":
            await asyncio.sleep(0.01)
        response = await c.get("/health")
        assert response.status == 503
        assert "by trainer (pid 7 on host)" in response.detail
        assert "paused at 20" in response.detail

    run(body)
