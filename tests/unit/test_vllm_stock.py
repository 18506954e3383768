"""A stock vLLM at ``engine.urls``: what it is asked, which version samples a token, and what proves a publish."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from support.sync_sessions import open_session
from support.tiny_policy import live_policy

from tandem.engines.base import EngineRequirements, LoadsVersions, LoraAdapter, ReceivesBroadcast
from tandem.engines.vllm.client import fleet as fleet_module
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.engines.vllm.client.fleet import Fleet
from tandem.engines.vllm.client.http import EngineUnreachable
from tandem.engines.vllm.client.urls import UrlServer
from tandem.engines.vllm.protocol import completion_request
from tandem.engines.vllm.spec import Vllm
from tandem.errors import EngineError, StaleWeights, TransportError
from tandem.model.policy import Policy
from tandem.ports import free_port
from tandem.trainable.lora import Lora
from tandem.transport.rendezvous import Rendezvous
from tandem.transport.weight_transfer import UniqueId, WeightTransferGroup, pickled
from tandem.types import PolicyVersion, Sampling
from tandem.weight_sync.broadcast import Broadcast
from tandem.weight_sync.hotswap import Hotswap
from tandem.weight_sync.transaction.session import WeightSyncSession

ADAPTERS = EngineRequirements(model="m", dtype="float32", payload="adapter", capability=LoadsVersions)
WEIGHTS = EngineRequirements(model="m", dtype="float32", payload="weights", capability=ReceivesBroadcast)
ADAPTER = LoraAdapter(config={}, tensors=())

Scores = Callable[[Sequence[int], float], list[float]]
"""Logprobs of tokens but the first at a temperature."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_SECONDS", 0.01)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


class StockVllm:
    """Routes of ``vllm serve``, as far as they are used; its completions are tokens 1, 2, 3 and so on."""

    def __init__(self, *, adapters: bool = False, transfer: bool = False, raw: bool = False):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.started, self.loaded, self.paths = 1, list[str](), list[str]()
        self.scores: Scores = lambda tokens, temperature: [-1.0] * (len(tokens) - 1)
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[dict[str, Any]] = []
        self.updated = list[str]()
        self._raw = raw
        self._routes = {"/v1/completions": self._complete}
        if adapters:
            self._routes |= {"/v1/load_lora_adapter": self._load, "/v1/unload_lora_adapter": self._unload}
        if transfer:
            names = ("pause", "resume", "start_weight_update", "update_weights", "finish_weight_update")
            self._routes |= dict.fromkeys([f"/{name}" for name in names], self._done)
            self._routes["/init_weight_transfer_engine"] = self._done

    async def answer(self, request: web.Request) -> web.Response:
        match request.path:
            case "/health":
                return web.Response()
            case "/metrics":
                return web.Response(text=f"process_start_time_seconds {self.started}\n")
            case "/get_world_size":
                return web.json_response({"world_size": 2})
            case "/v1/models":
                named = [{"id": "m", "max_model_len": 128, "parent": None}]
                return web.json_response({"data": named + [{"id": name, "parent": "m"} for name in self.loaded]})
        if request.path not in self._routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.method == "GET":
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        if request.content_type != "application/json":
            return web.json_response({"detail": "Unsupported Media Type"}, status=415)
        self.paths.append(request.path_qs)
        return await self._routes[request.path](json.loads(await request.read()))

    async def _complete(self, body: dict[str, Any]) -> web.Response:
        self.requests.append(body)
        if body["model"] not in ("m", *self.loaded):
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        await self.gate.wait()
        prompt, new = body["prompt"], list(range(1, body["max_tokens"] + 1))
        temperature = body["temperature"] or 1.0
        if temperature < 0.1:
            logprobs = [-5.0 if self._raw else 0.0] * len(new)
        else:
            logprobs = self.scores([*prompt, *new], temperature)[len(prompt) - 1 :]
        choice = {"token_ids": new, "finish_reason": "length", "logprobs": {"token_logprobs": logprobs}}
        if "prompt_logprobs" in body:
            scored = zip(prompt[1:], self.scores(prompt, 1.0), strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in scored)]
        return web.json_response({"choices": [choice]})

    async def _load(self, body: dict[str, Any]) -> web.Response:
        self.loaded.append(body["lora_name"])
        return web.Response(text="Success")

    async def _unload(self, body: dict[str, Any]) -> web.Response:
        self.loaded.remove(body["lora_name"])
        return web.Response(text="Success")

    async def _done(self, body: dict[str, Any]) -> web.Response:
        self.updated += body.get("update_info", {}).get("names", [])
        return web.json_response({"message": "done"})

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rpartition(":")[2]), reuse_address=True).start()
        try:
            yield
        finally:
            await runner.cleanup()


@asynccontextmanager
async def engine_of(*servers: StockVllm, requirements: EngineRequirements) -> AsyncIterator[VllmEngine]:
    clients = [UrlServer(server.url, "", control_seconds=5.0, request_seconds=5.0) for server in servers]
    options = Vllm(urls=tuple(server.url for server in servers), start_seconds=5.0)
    engine = VllmEngine(Fleet(clients, launch=None, options=options, requirements=requirements), context=128, ends=[0])
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def publish_adapter(engine: VllmEngine, step: int) -> None:
    await engine.swap(Path("adapters"), PolicyVersion(step=step, digest=f"d{step}"), ADAPTER)
    await engine.set_version(PolicyVersion(step=step, digest=f"d{step}"))
    await engine.resume()


async def eventually(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("able", "requirements", "says"),
    [
        ({}, ADAPTERS, r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora"),
        ({}, WEIGHTS, r"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config"),
        ({"adapters": True}, WEIGHTS, r"For trainable: lora use sync: hotswap"),
        ({"transfer": True}, ADAPTERS, r"For whole weights use sync: broadcast"),
        ({"adapters": True, "raw": True}, ADAPTERS, r"raw_logprobs; start it with --logprobs-mode"),
    ],
    ids=["neither, adapters", "neither, weights", "adapters alone", "transfer alone", "raw logprobs"],
)
def test_a_server_that_cannot_be_published_to_is_refused_with_the_flags_it_needs(
    able: dict[str, bool], requirements: EngineRequirements, says: str
) -> None:
    async def go() -> None:
        server = StockVllm(**able)
        async with server.up():
            with pytest.raises(EngineError, match=says):
                async with engine_of(server, requirements=requirements):
                    pass

    run(go())


def test_a_request_is_sampled_by_the_version_it_began_with_and_waits_for_the_one_it_asks_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        server = StockVllm(adapters=True)
        async with server.up(), engine_of(server, requirements=ADAPTERS) as engine:
            assert caplog.text.count("proven by a probe alone") == 1
            await publish_adapter(engine, 0)
            (first,) = server.loaded
            server.gate.clear()
            old = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=3, top_k=7, stop=("x",)), key=0))
            await eventually(lambda: len(server.requests) == 2)
            assert engine.accept_requests_for(1)
            new = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=2), key=0))
            for step in (1, 2):
                await publish_adapter(engine, step)
            assert first in server.loaded, "it is sampled from"
            server.gate.set()
            assert ((await old).tokens, (await old).versions) == ((1, 2, 3), (0, 0, 0))
            assert (await new).versions == (1, 1)
            await publish_adapter(engine, 3)
            assert len(server.loaded) == ADAPTERS.versions
            begun, later = server.requests[1:3]
            assert (begun["model"], begun["prompt"], begun["top_k"], begun["stop"]) == (first, [5, 6], 7, ["x"])
            assert begun["return_token_ids"]
            assert begun["cache_salt"] != later["cache_salt"]

    run(go())


def test_whole_weights_are_transferred_once_what_is_in_flight_has_ended() -> None:
    async def go() -> None:
        server = StockVllm(transfer=True)
        async with server.up(), engine_of(server, requirements=WEIGHTS) as engine:
            assert [len(ranks) for ranks in await engine.workers()] == [2]
            place = {"host": "127.0.0.1", "port": 5, "world": 3, "backend": "nccl", "name": "n", "seconds": 5.0}
            await engine.connect(place, [1])
            await engine.set_version(PolicyVersion(step=0, digest="d0"))
            await engine.resume()
            server.gate.clear()
            server.paths.clear()
            flying = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=2), key=0))
            await eventually(lambda: server.paths)
            pausing = asyncio.ensure_future(engine.pause(step=1))
            await asyncio.sleep(0.05)
            assert not pausing.done()
            assert server.paths == ["/v1/completions"]
            engine.accept_requests_for(1)
            waiting = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=2), key=0))
            server.gate.set()
            await pausing
            await engine.receive([("w", (2, 3), "float32")], 1 << 20, None)
            assert (await engine.probe([1, 2, 3]))[0].scored == (-1.0, -1.0)
            await engine.set_version(PolicyVersion(step=1, digest="d1"))
            assert not waiting.done()
            await engine.resume()
            assert ((await flying).versions, (await waiting).versions) == ((0, 0), (1, 1))
            assert server.paths == [
                "/v1/completions", "/pause?mode=wait", "/start_weight_update", "/update_weights",
                "/finish_weight_update", "/resume", "/v1/completions", "/resume", "/v1/completions",
            ]  # fmt: skip

    run(go())


def test_weights_that_are_not_trained_travel_along_since_vllm_reloads_whole_layers(tiny_model: Path) -> None:
    trainable = Lora(rank=4, merged=True, target_modules=("q_proj",))

    async def go(policy: Policy) -> None:
        server = StockVllm(transfer=True)
        async with server.up(), engine_of(server, requirements=WEIGHTS) as engine:
            session = WeightSyncSession(
                sync=Broadcast(), policy=policy, engine=engine, trainable=trainable, folder=Path()
            )
            sent: list[str] = []
            session.member = SimpleNamespace(send=lambda named, bucket_bytes: sent.extend(name for name, _ in named))
            await Broadcast().transfer(session, PolicyVersion(step=1, digest=""))
            assert sorted(sent) == sorted(server.updated) == sorted(trainable.base_names(policy.model))

    with live_policy(tiny_model, trainable=trainable) as policy:
        run(go(policy))


def test_one_that_was_restarted_is_published_to_again_before_it_samples() -> None:
    async def go() -> None:
        server = StockVllm(adapters=True)
        async with server.up(), engine_of(server, requirements=ADAPTERS) as engine:
            published = [0]

            async def republish() -> None:
                if await engine.recover():
                    published[0] += 1
                    await publish_adapter(engine, 0)

            engine.on_restart(republish)
            await publish_adapter(engine, 0)
            server.started, server.loaded = 2, []
            assert (await engine.generate([5, 6], Sampling(max_tokens=2), key=0)).versions == (0, 0)
            assert published == [1]

    run(go())


def test_a_request_that_waits_at_a_server_that_is_given_up_is_free_to_go_elsewhere() -> None:
    async def go() -> None:
        server = StockVllm(adapters=True)
        async with server.up(), engine_of(server, requirements=ADAPTERS) as engine:
            (client,) = engine.servers
            assert isinstance(client, UrlServer)
            request = completion_request([5, 6], Sampling(), limit=8, ends=[0], min_step=1)
            waiting = asyncio.ensure_future(client.sample(request, seed=None, later=0.0))
            await asyncio.sleep(0.05)
            client.leave()
            with pytest.raises(EngineUnreachable):
                await waiting

    run(go())


@pytest.fixture
def policy(tiny_model: Path) -> Iterator[Policy]:
    with live_policy(tiny_model, trainable=Lora(rank=4)) as live:
        yield live


@pytest.mark.parametrize("arrives", [True, False])
def test_a_publish_is_proven_by_a_probe_alone(policy: Policy, tmp_path: Path, arrives: bool) -> None:
    """Where an adapter is loaded and not sampled from, only logprobs can tell."""

    async def go() -> None:
        server = StockVllm(adapters=True)

        def stale(tokens: Sequence[int], temperature: float) -> list[float]:
            bare = Lora(rank=4).untrained(policy.model)
            assert bare is not None
            with bare:
                return policy.scores(tokens, temperature)[0]

        server.scores = lambda tokens, temperature: policy.scores(tokens, temperature)[0]
        async with server.up(), engine_of(server, requirements=ADAPTERS) as engine:
            start = PolicyVersion(step=0, digest="")
            async with open_session(Hotswap(), policy, engine, start, Lora(rank=4), tmp_path) as session:
                async with session.commit(1) as commit:
                    with torch.no_grad():
                        for parameter in policy.model.parameters():
                            if parameter.requires_grad:
                                parameter.add_(0.2 * torch.randn_like(parameter))
                    if not arrives:
                        server.scores = stale
                assert commit.published is not None
                assert commit.published.probe_gap is not None

    if arrives:
        run(go())
    else:
        with pytest.raises(StaleWeights, match="answers a probe as"):
            run(go())


def test_the_id_of_a_group_is_what_vllm_unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["vllm", "distributed", "device_communicators", "pynccl_wrapper"]
    for end in range(1, len(names) + 1):
        module = ModuleType(names[end - 1])
        module.ncclUniqueId = UniqueId  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), module)
    assert bytes(pickle.loads(pickled(bytes(range(128))))) == bytes(range(128))


def test_weights_of_a_trainer_without_a_gpu_are_refused_with_what_can_be() -> None:
    meeting = Rendezvous(host="127.0.0.1", world=2, backend="gloo")
    with pytest.raises(TransportError, match=r"by NCCL alone.*trainable: lora with sync: hotswap"):
        WeightTransferGroup(meeting, torch.device("cpu"))
