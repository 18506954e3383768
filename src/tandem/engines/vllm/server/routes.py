"""Tandem's routes on vLLM's stock server (``--middleware``): /generate, /bridge/*, /lora/* and /nccl/*.

Everything else passes through untouched, but for three things (``stock``): requests get a cache salt, so that no prefix
outlives the weights it was computed with; replies wait while weights are being proven; and adapters that vLLM's own
route is asked to load must lie where adapters may come from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.protocol import Refusal, parsed
from tandem.engines.vllm.server.adapters import IN_PLACE_ID, Adapters
from tandem.engines.vllm.server.admission import EngineLimits
from tandem.engines.vllm.server.asgi import Receive, Scope, Send, answer, authorise, disconnected, read, refuse, unless
from tandem.engines.vllm.server.frontend import Frontend, Stopped
from tandem.engines.vllm.server.many import ManyAnswers
from tandem.engines.vllm.server.stock import Stock
from tandem.engines.vllm.server.watch import TrainerWatch
from tandem.engines.vllm.worker.parameter_map import SOURCE


async def probe(front: Frontend, request: wire.ProbeRequest, adapter: Any = None) -> dict[str, Any]:
    """Score the tokens and sample a few after them."""
    tokens = request.tokens
    once: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    sample = {**once, "temperature": request.temperature, "max_tokens": request.max_tokens, "ignore_eos": True}
    longer = beyond_a_block(tokens, front.client.vllm_config)
    async with front.proving():
        salt = front.salt
        # Scoring reads no prefix cache but fills it, so that what it fills is kept from the others.
        asks = [(tokens, {**sample, "logprobs": 0}, salt), (tokens, {**once, "prompt_logprobs": 0}, f"{salt}-scored")]
        asks += [(longer, once, salt)] if longer else []
        answers = asyncio.gather(*(front.generate(t, params, adapter=adapter, probe=key) for t, params, key in asks))
        await asyncio.sleep(0)  # each is handed in
    sampled, scored, *more = await answers
    answer, cached = sampled.completions[0], (more or [sampled])[0].cached
    return {
        "scored": [p[t] for t, p in zip(tokens[1:], (scored.prompt_logprobs or [])[1:], strict=True) if p],
        "tokens": answer.tokens,
        "logprobs": answer.own_logprobs,
        "finish": answer.finish,
        "cached": cached,
    }


def beyond_a_block(tokens: Sequence[int], config: Any) -> list[int]:
    """The tokens again and again, one more than the prefix cache's unit: it keeps nothing that is shorter.

    Empty where they are long enough by themselves, or where so many would not fit. ``config`` is vLLM's.
    """
    block = int(config.cache_config.block_size)
    if len(tokens) > block or block + 1 >= config.model_config.max_model_len:
        return []
    return ([*tokens] * (block // len(tokens) + 1))[: block + 1]


MAX_REASON_CHARS = 4000
"""Characters of a reason that are kept."""
LOOK_SECONDS = 0.02
"""Between two looks whether every worker has joined the trainer's process group."""
MANY = "/generate/many"
"""The route whose answers are sent one by one."""
SAMPLE = frozenset({"/generate", "/bridge/probe"})
"""Routes of ours whose work ends with their client; the others, once begun, leave nothing half done."""


class Endpoint(NamedTuple):
    """What answers a route of ours."""

    method: str
    handler: Callable[[Any], Awaitable[Any]]
    body: type | None = None
    """What its body is read as; None: it takes none."""
    awake: bool = False
    """It reads or writes memory which an engine that sleeps does not have."""


class Routes:
    """The middleware. It finds vLLM's engine in the application's state at the first request."""

    def __init__(self, app: Any):
        self._app = app
        self._live: _Live | None = None
        self._watch = TrainerWatch.begin()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI event."""
        if scope["type"] != "http":
            try:
                if scope["type"] == "websocket":
                    authorise(scope, "")
            except Refusal as error:
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
                return
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            authorise(scope, path)
            live = self._engine(scope)
            if path == MANY and scope["method"] == "POST":
                await live.many.generate(await read(receive), receive, send)
                return
            route = live.routes.get(path)
            if route is not None:
                await answer(send, await self._handled(live, path, route, scope["method"], receive))
                return
        except Exception as error:
            await refuse(send, error)
            return
        await live.stock(path, scope, receive, send)

    def _engine(self, scope: Scope) -> _Live:
        if self._live is None:
            engine = getattr(scope["app"].state, "engine_client", None)
            if engine is None:
                raise Refusal(503, "the engine is starting")
            self._live = _Live(engine, scope["app"].state, self._watch, self._app)
        return self._live

    async def _handled(self, live: _Live, path: str, route: Endpoint, method: str, receive: Receive) -> Any:
        if method != route.method:
            raise Refusal(405, f"{path} answers {route.method}, not {method}")
        body = await read(receive)
        if live.sleep_level and route.awake:
            raise Refusal(409, f"{path} needs memory that this engine has released: wake it first (POST /bridge/wake)")
        work = route.handler(None if route.body is None else parsed(body, route.body))
        if path in SAMPLE:
            return await unless(work, disconnected(receive), live.frontend.broken_off())
        return await unless(work, live.frontend.died())


class _Live:
    """The routes over a live engine."""

    def __init__(self, engine: Any, state: Any, watch: TrainerWatch | None, app: Any):
        self.client = engine
        self._watch = watch
        self.frontend = Frontend(engine)
        self.limits = EngineLimits(engine)
        self.stock = Stock(app, self.frontend)
        self.adapters = Adapters(self.frontend, state)
        self._announced: list[wire.Entry] = []
        self._connected = False
        self.sleep_level = 0
        """How deep the engine sleeps; 0: it is awake."""
        self.many = ManyAnswers(self.frontend, self.adapters, self.limits)
        self.routes: dict[str, Endpoint] = {
            "/health": Endpoint("GET", self.health),
            "/generate": Endpoint("POST", self.generate, wire.Generate),
            "/generate/take_back": Endpoint("POST", self.many.take_back, wire.TakeBack),
            "/bridge/info": Endpoint("GET", self.info),
            "/bridge/state_dict_info": Endpoint("GET", self.state_dict_info),
            "/bridge/notify_update": Endpoint("POST", self.notify_update, wire.Notify),
            "/bridge/pause": Endpoint("POST", self.pause, wire.Pause),
            "/bridge/resume": Endpoint("POST", self.resume, wire.Body, awake=True),
            "/bridge/lend": Endpoint("POST", self.export_weights, wire.Body, awake=True),
            "/bridge/checksums": Endpoint("POST", self.checksums, wire.Checksums, awake=True),
            "/bridge/probe": Endpoint("POST", self.probe, wire.ProbeRequest, awake=True),
            "/bridge/stamp": Endpoint("POST", self.set_version, wire.SetVersion),
            "/bridge/stop": Endpoint("POST", self.stop, wire.Stop),
            "/bridge/sleep": Endpoint("POST", self.sleep, wire.Sleep),
            "/bridge/wake": Endpoint("POST", self.wake, wire.Body),
            "/bridge/lend_slot": Endpoint("POST", self.export_adapter, wire.ExportAdapter, awake=True),
            "/bridge/adopt": Endpoint("POST", self.reattach, wire.Reattach),
            "/lora/status": Endpoint("GET", self.adapters.status),
            "/lora/load": Endpoint("POST", self.adapters.load, wire.LoadAdapter, awake=True),
            "/lora/unload": Endpoint("POST", self.adapters.unload, wire.UnloadAdapter),
            "/nccl/start_receiver": Endpoint("POST", self.start_receiver, wire.StartReceiver),
            "/nccl/status": Endpoint("GET", self.connection),
            "/nccl/stop_receiver": Endpoint("POST", self.stop_receiver),
            "/nccl/receive": Endpoint("POST", self.receive, wire.Receive, awake=True),
        }

    async def health(self, _: None) -> Any:
        await self.client.check_health()
        front = self.frontend
        if front.state == "stopped":
            raise Stopped(front.reason)
        requests = {"running": front.places.running, "waiting": front.places.waiting}
        status = {"status": "ok", "engine": front.id, "state": front.state, "step": front.step, **requests}
        return {**status, "paused": front.lease.report}

    async def generate(self, request: wire.Generate) -> wire.Generated:
        if request.stream:
            raise Refusal(400, "stream: /generate answers when all is sampled; /v1/completions streams")
        prompt = request.prompt
        ids = await self.limits.ids(prompt) if isinstance(prompt, str) else prompt.prompt_token_ids
        self.limits.check(ids, request)
        adapter = None if request.adapter is None else self.adapters.named(request.adapter)
        record = await self.frontend.generate(ids, request.sampling(), adapter=adapter, min_step=request.min_step)
        completions, text = record.completions, prompt if isinstance(prompt, str) else ""
        if not text and request.detokenize:
            text = self.client.get_tokenizer().decode(ids)
        return wire.Generated(
            text=[c.text for c in completions],
            prompt=text,
            finish_reasons=[c.finish for c in completions],
            logprobs=[[[p] for p in c.logprobs] for c in completions] if request.logprobs is not None else None,
            prompt_logprobs=record.prompt_logprobs,
            prompt_token_ids=list(ids),
            token_ids=[c.tokens for c in completions],
            versions=[wire.runs(self.frontend.steps_of(c)) for c in completions],
            engine=self.frontend.id,
            cached=record.cached,
        )

    async def info(self, _: None) -> wire.EngineInfo:
        front, config = self.frontend, self.client.vllm_config
        return wire.EngineInfo(
            engine=front.id,
            state=front.state,
            reason=front.reason,
            step=front.step,
            digest=front.digest,
            updates=front.updates,
            running=front.places.running,
            adapter=front.adapter.lora_name if front.adapter else None,
            model=config.model_config.model,
            context=config.model_config.max_model_len,
            logprobs=str(config.model_config.logprobs_mode),
            adapters=config.lora_config is not None,
            workers=[wire.Workers(**worker) for worker in await front.rpc("tandem_info")],
        )

    async def state_dict_info(self, _: None) -> Any:
        ranks = [json.loads(text) for text in await self.frontend.rpc("tandem_map")]
        config = self.client.vllm_config
        return {
            "model": config.model_config.model,
            "tp_degree": config.parallel_config.tensor_parallel_size,
            "num_params": len(ranks[0]),
            "param_names": sorted(ranks[0]),
            "param_mappings": {name: places[0] for name, places in ranks[0].items()},
            "ranks": ranks,
        }

    async def notify_update(self, request: wire.Notify) -> Any:
        requested_step = request.update_count if request.step is None else request.step
        step = self.frontend.step + 1 if requested_step is None else requested_step
        await self.frontend.set_version(step, request.digest, self.frontend.adapter)
        return {"status": "ok", "step": step, "updates": self.frontend.updates}

    async def pause(self, request: wire.Pause) -> Any:
        by = request.by or "somebody"
        reason = f"{by} pauses it to publish, before what it held was proven; one trainer at a time can publish to it"
        before = await self.frontend.pause(finish=request.finish, reason=reason, step=request.step)
        self.frontend.lease.renew(request.seconds, by)
        if self.client.vllm_config.parallel_config.tensor_parallel_size > 1:
            # vLLM reads what the first worker sampled: others may be at the end of their pass still.
            await self.frontend.rpc("tandem_settle")
        return {"state": self.frontend.state, "before": before}

    async def resume(self, _: wire.Body) -> Any:
        front, seconds = self.frontend, await self.frontend.resume()
        return {"seconds": seconds, "state": front.state, "step": front.step, "digest": front.digest}

    async def export_weights(self, _: wire.Body) -> Any:
        self._require_paused("/bridge/lend moves")
        ranks = [json.loads(text) for text in await self.frontend.rpc("tandem_export_weights")]
        self.frontend.derives = any(name.startswith(SOURCE) for name in ranks[0]["lent"]["tensors"])
        return {"model": self.client.vllm_config.model_config.model, "ranks": ranks}

    async def checksums(self, request: wire.Checksums) -> Any:
        await self.frontend.in_turn()
        if request.payload == "weights":
            ranks = await self.frontend.rpc("tandem_checksums")
        else:
            lora_id = IN_PLACE_ID if request.adapter is None else self.adapters.named(request.adapter).lora_int_id
            config = json.dumps(request.config)
            ranks = await self.frontend.rpc("tandem_adapter_checksums", lora_id, request.names, config)
        return {"ranks": ranks, "engine": self.frontend.id}

    async def probe(self, request: wire.ProbeRequest) -> Any:
        self.limits.prompt(request.tokens)
        self.limits.length("max_tokens", request.max_tokens)
        # What was written in place is served only once it is stamped, so it is named here.
        adapter = self.adapters.in_place if request.adapter is None else self.adapters.named(request.adapter)
        return await probe(self.frontend, request, adapter)

    async def set_version(self, request: wire.SetVersion) -> Any:
        if request.step is None:
            raise Refusal(400, "step is missing: which policy step do these weights belong to?")
        adapter = self.adapters.in_place if request.adapter is None else self.adapters.named(request.adapter)
        await self.frontend.set_version(request.step, request.digest, adapter)
        return {"step": request.step, "engine": self.frontend.id}

    async def stop(self, request: wire.Stop) -> Any:
        await self.frontend.stop(request.reason[:MAX_REASON_CHARS])
        return {"state": self.frontend.state}

    async def sleep(self, request: wire.Sleep) -> Any:
        """Release the memory; twice is once."""
        front = self.frontend
        self._require_paused("/bridge/sleep takes the memory of")
        if running := front.places.running:
            raise Refusal(409, f"{running} requests are in flight, and sleep would lose their keys and values")
        if not getattr(self.client.vllm_config.model_config, "enable_sleep_mode", False):
            raise Refusal(409, "this engine cannot sleep: start it with --enable-sleep-mode (engine.sleep)")
        if not self.sleep_level:
            front.lease.hold()
            front.written = front.written or request.level > 1
            self.sleep_level = request.level
            await self.client.sleep(request.level)
        return {"level": self.sleep_level}

    async def wake(self, _: wire.Body) -> Any:
        """Have the memory again, and stay paused; an engine that is awake is left alone."""
        if self.sleep_level:
            await self.client.wake_up()
            await self.frontend.still()  # some releases begin to schedule as they wake up
            self.sleep_level = 0
            self.frontend.lease.renew()
        return {"level": self.sleep_level}

    async def export_adapter(self, request: wire.ExportAdapter) -> Any:
        self._require_paused("/bridge/lend_slot writes")
        return {"ranks": await self.adapters.export_adapter(request)}

    async def reattach(self, request: wire.Reattach) -> Any:
        if self._watch is None:
            raise Refusal(409, "nobody's trainer is watched here: this engine ends when whoever started it ends it")
        if not self._watch.reattach(request.trainer):
            raise Refusal(404, f"no process {request.trainer.partition(':')[0]} runs here that started then")
        return {"engine": self.frontend.id}

    async def start_receiver(self, request: wire.StartReceiver) -> Any:
        """POST /nccl/start_receiver: join in the background; /nccl/status tells how it went."""
        place = urlsplit(request.init_method)
        if place.scheme != "tcp" or not place.hostname or not place.port:
            raise Refusal(400, f"init_method must be tcp://host:port of rank 0, not {request.init_method!r}")
        meeting = {"host": place.hostname, "port": place.port, "world": request.world_size}
        meeting |= {"backend": request.backend, "name": request.name, "seconds": request.seconds}
        self._announced = _entries(bytes(request.param_metadata))
        await self.frontend.rpc("tandem_connect", json.dumps(meeting), request.first_rank)
        return await self.connection()

    async def connection(self, _: None = None) -> Any:
        """GET /nccl/status: idle, connecting, connected, or error with its reason."""
        ranks = await self.frontend.rpc("tandem_connection")
        states = [rank["state"] for rank in ranks]
        worst = next(state for state in ("error", "idle", "connecting", "connected") if state in states)
        reasons = [rank["reason"] for rank in ranks if rank["reason"]]
        self._connected = worst == "connected"
        return {"status": worst, "error": "; ".join(reasons) or None, "ranks": ranks}

    async def stop_receiver(self, _: None) -> Any:
        """POST /nccl/stop_receiver: leave the group."""
        await self.frontend.rpc("tandem_disconnect")
        return await self.connection()

    async def receive(self, request: wire.Receive) -> Any:
        """POST /nccl/receive: take one publish. If it breaks off, the engine is stopped: its weights are in doubt."""
        self._require_paused("/nccl/receive overwrites")
        announced = request.manifest or self._announced
        if not announced:
            raise Refusal(400, "manifest is missing, and start_receiver was given no param_metadata: what comes?")
        while not self._connected:
            if (state := (await self.connection())["status"]) in ("error", "idle"):
                raise Refusal(409, f"this engine is in no process group ({state}): start the receiver, and wait for it")
            await asyncio.sleep(LOOK_SECONDS)
        lora_id = 0 if request.config is None else IN_PLACE_ID
        if lora_id:
            self.adapters.require_enabled()
        self._announced = announced
        try:
            self.frontend.written = True
            arguments = json.dumps(announced), request.bucket_bytes, lora_id, json.dumps(request.config)
            await self.frontend.rpc("tandem_receive", *arguments)
        except Exception as error:
            await self.frontend.stop(f"a publish broke off while it was being received: {error}")
            raise
        if lora_id:
            self.adapters.written()
        if request.verify:
            async with self.frontend.proving():
                pass
        return {"status": "ok", "tensors": len(self._announced)}

    def _require_paused(self, what: str) -> None:
        if self.frontend.state not in ("paused", "stopped"):
            raise Refusal(409, f"{what} what is being sampled from: pause first (POST /bridge/pause)")


def _entries(metadata: bytes) -> list[wire.Entry]:
    """What ``param_metadata`` announces, in either form."""
    if b'"param_names"' not in metadata:
        named = parsed(metadata, dict[str, wire.Metadata])
        return [(name, meta.shape, meta.dtype.removeprefix("torch.")) for name, meta in named.items()]
    listed = parsed(metadata, wire.Listed)
    shapes, dtypes = listed.param_shapes, listed.param_dtypes
    if missing := [name for name in listed.param_names if name not in shapes or name not in dtypes]:
        raise Refusal(400, f"param_metadata: {missing[0]!r} is missing from param_shapes or param_dtypes")
    return [(name, shapes[name], dtypes[name].removeprefix("torch.")) for name in listed.param_names]
