"""Servers at ``engine.urls``: Tandem's own, or a stock vLLM, whose routes then stand in for Tandem's.

A stock server neither checksums its weights nor tags tokens with versions. Each publish is therefore proven by a probe
alone, and no request sees two versions: an adapter has a name of its own for each version, which a request keeps to its
end, and whole weights are transferred once the requests in flight have ended.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tandem.engines.base import EngineRequirements, LoadsVersions, ReceivesBroadcast
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client.http import EngineCoreDied, EngineReplaced, EngineServer, EngineUnreachable
from tandem.engines.vllm.protocol import UNFILTERED, Sampled
from tandem.errors import EngineError
from tandem.observability import waits

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
INIT, UPDATE = "/init_weight_transfer_engine", "/update_weights"
START_ADAPTERS = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank RANK --max-loras 2 "
    "--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj --logprobs-mode processed_logprobs"
)
START_TRANSFER = (
    'VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config \'{"backend": "nccl"}\' '
    "--logprobs-mode processed_logprobs"
)
REFUSAL_SECONDS = 1.0
"""How long a server that refuses to join a group takes to say so; one that joins waits for the trainer."""
SHARP = 1e-3
"""A temperature at which a sampled token's logprob is about 0, unless the temperature is left out of it."""
PASSED = (
    "max_tokens", "min_tokens", "temperature", "stop", "stop_token_ids", "include_stop_str_in_output", *UNFILTERED
)  # fmt: skip
"""Fields of ``Generate`` that /v1/completions has by the same names. All are said in every request: a stock server
takes what is not said from the model's generation_config.json."""


class SampledChoice(msgspec.Struct):
    """Part of an answer of /v1/completions: one completion."""

    token_ids: list[int]
    logprobs: dict[str, list[Any]]
    """Under ``token_logprobs``, each token's own."""
    finish_reason: str | None
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None


class CompletionResponse(msgspec.Struct):
    """Answer of /v1/completions."""

    choices: list[SampledChoice]


class Model(msgspec.Struct):
    """Part of an answer of /v1/models: the model, or an adapter of it."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """Answer of /v1/models."""

    data: list[Model]


class UrlServer(EngineServer):
    """Client of a server that was not started here; of a stock one it keeps the state that Tandem's own keep."""

    def __init__(self, url: str, key: str, *, control_seconds: float, request_seconds: float):
        super().__init__(url, key, control_seconds=control_seconds, request_seconds=request_seconds)
        self._looked_at = ""
        self._forget()
        self._model = Model("")
        self._takes_adapters = self._takes_weights = False
        self._world, self._logprobs = 1, ""
        self._flying: Counter[str | None] = Counter()
        self._changed = asyncio.Event()
        self._paused_at = 0.0
        self._joining: asyncio.Task[None] | None = None
        self._routes: Mapping[str, Callable[[Any], Awaitable[Any]]] = {
            "/health": self._health,
            "/bridge/pause": self._pause,
            "/bridge/resume": self._resume,
            "/bridge/stamp": self._set_version,
            "/bridge/stop": self._stop,
            "/bridge/probe": self._probe,
            "/lora/status": self._adapters,
            "/lora/load": self._load,
            "/lora/unload": self._unload,
            "/nccl/start_receiver": self._join,
            "/nccl/receive": self._receive,
            "/nccl/stop_receiver": self._leave_group,
        }

    def _forget(self) -> None:
        self._state, self._step, self._digest = "new", -1, ""
        self._adapter: str | None = None

    async def info(self) -> wire.EngineInfo:
        """What it is and holds; at first, whether it is a stock vLLM.

        Raises:
            EngineError: it is neither that nor Tandem's.
        """
        if not self.plain and (await self.ask("GET", "/bridge/info"))[0] != 404:
            return await super().info()
        models = await self.get(MODELS, Models)
        self.plain = True
        self._model = next((model for model in models.data if model.parent is None), self._model)
        started = await self._started()
        if started != self._looked_at:
            await self._look()
            self._looked_at = started
        elif self._state == "away":
            self._state = "new"
        return wire.EngineInfo(
            engine=started, state=self._state, reason="", step=self._step, digest=self._digest, updates=0,
            running=self._flying.total(), adapter=self._adapter, model=self._model.id,
            context=self._model.max_model_len or 0, logprobs=self._logprobs, adapters=self._takes_adapters,
            workers=[
                wire.Workers(rank=rank, pid=0, device="", accelerator=f"{self.url}#{rank}")
                for rank in range(self._world)
            ],
        )  # fmt: skip

    async def _look(self) -> None:
        """What a server that was just met can do: a route that only takes POST refuses GET, one not there is not found.

        Raises:
            EngineError: it gives no token ids or no logprobs.
        """
        self._forget()
        statuses = [(await self.ask("GET", path))[0] for path in (LOAD, UPDATE)]
        self._takes_adapters, self._takes_weights = (status == 405 for status in statuses)
        if self._takes_weights:
            self._world = (await self.get("/get_world_size", dict))["world_size"]
            await self._tell("/resume")  # its trainer may have died while it was paused
        choice = await self._complete([0], None, max_tokens=1, temperature=SHARP, **UNFILTERED)
        processed = abs(choice.logprobs["token_logprobs"][0]) < 0.5
        self._logprobs = "processed_logprobs" if processed else "raw_logprobs"

    def lacks(self, requirements: EngineRequirements) -> str:
        way = requirements.payload, requirements.capability
        takes: dict[tuple[str, type | None], bool] = {
            ("adapter", LoadsVersions): self._takes_adapters,
            ("weights", ReceivesBroadcast): self._takes_weights,
        }
        if not self.plain or requirements.capability is None or takes.get(way):
            return ""
        return (
            f"{self.name} is a stock vLLM and cannot be published to as this run does. For trainable: lora use sync: "
            f"hotswap and start it by\n  {START_ADAPTERS}\nFor whole weights use sync: broadcast and start it by\n"
            f"  {START_TRANSFER}\nOr start Tandem's by: tandem serve engine RECIPE"
        )

    def leave(self) -> None:
        self._state = "away"
        self._changed.set()

    async def _call(self, method: str, path: str, body: Any, kind: Any, seconds: float) -> Any:
        if self.plain and path in self._routes:
            return await self._routes[path](body)
        return await super()._call(method, path, body, kind, seconds)

    async def _tell(self, path: str, body: Any = None) -> None:
        """POST what is answered in no particular form."""
        status, content = await self.ask("POST", path, {} if body is None else body)
        self._refused(path, status, content)

    async def _started(self) -> str:
        """When its process started, which tells it from one that took its place.

        Raises:
            EngineError: it does not say.
        """
        _, content = await self.ask("GET", "/metrics")
        line = re.search(rb"^process_start_time_seconds (\S+)$", content, re.MULTILINE)
        if line is None:
            raise EngineError(
                f"{self.name} does not say in /metrics when its process started; start it with one API server process"
            )
        return f"started at {line[1].decode()}"

    async def _until(self, ready: Callable[[], bool], reason: str, *, on: str, seconds: float) -> None:
        """Wait for the state to be so.

        Raises:
            EngineUnreachable: the server is not used any more.
        """
        if ready():
            return
        async with waits.waiting(waits.actor("trainer"), reason, on=on, deadline=seconds):
            while not ready():
                if self._state == "away":
                    raise EngineUnreachable(f"{self.name} does not answer any more")
                self._changed.clear()
                await self._changed.wait()

    # Sampling

    async def sample(self, request: wire.Generate, *, seed: int | None, later: float) -> Sampled:
        """One completion, by one version; it begins once the version that it asks for is served."""
        least, seconds = request.min_step, self.request_seconds + later
        await self._until(
            lambda: self._state == "serving" and self._step >= least, "a version", on="trainer", seconds=seconds
        )
        step, adapter = self._step, self._adapter
        self._flying[adapter] += 1
        try:
            return await self.generated(request, adapter, seed, step)
        finally:
            self._flying[adapter] -= 1
            self._changed.set()

    async def generated(self, request: wire.Generate, adapter: str | None, seed: int | None, step: int) -> Sampled:
        """One completion, by an adapter's name or by the model itself, of a policy step."""
        assert isinstance(request.prompt, wire.Ids)
        options = {name: getattr(request, name) for name in PASSED}
        if request.regex:
            options["structured_outputs"] = {"regex": request.regex}
        # A salt for each version: keys and values of older weights are never used again.
        salt = f"{self._step}-{self._digest}"
        prompt = request.prompt.prompt_token_ids
        choice = await self._complete(prompt, adapter, seed=seed, cache_salt=salt, **options)
        return Sampled(
            number=0,
            tokens=tuple(choice.token_ids),
            logprobs=tuple(choice.logprobs["token_logprobs"]),
            versions=[(step, len(choice.token_ids))],
            finish=choice.finish_reason or "abort",
            engine=self.instance_id,
        )

    async def _complete(self, prompt: Sequence[int], adapter: str | None, **options: Any) -> SampledChoice:
        body = {"model": adapter or self._model.id, "prompt": list(prompt), "logprobs": 0, **options}
        body["return_token_ids"] = True
        status, content = await self.ask("POST", COMPLETIONS, body, self.request_seconds)
        if status == 404 and adapter is not None:
            raise EngineReplaced(f"{self.name} has no adapter {adapter} any more: restarted, or unloaded by another")
        if status >= 500 and await self.gone():
            raise EngineCoreDied(f"{self.name} answers {COMPLETIONS} with {status}, and ends")
        self._refused(COMPLETIONS, status, content)
        try:
            (choice,) = msgspec.json.decode(content, type=CompletionResponse).choices
        except (msgspec.DecodeError, ValueError) as error:
            raise self.odd(COMPLETIONS, f"{error}; it must answer with token_ids and logprobs") from error
        return choice

    async def _probe(self, body: wire.ProbeRequest) -> wire.ProbeResponse:
        choice = await self._complete(
            body.tokens, body.adapter, max_tokens=body.max_tokens, temperature=body.temperature,
            prompt_logprobs=0, ignore_eos=True, cache_salt=f"probe-{time.time_ns()}", **UNFILTERED
        )  # fmt: skip
        known = zip(body.tokens[1:], (choice.prompt_logprobs or [])[1:], strict=True)
        return wire.ProbeResponse(
            scored=[None if logprobs is None else logprobs[token]["logprob"] for token, logprobs in known],
            tokens=choice.token_ids,
            logprobs=list[float | None](choice.logprobs["token_logprobs"]),
            finish=choice.finish_reason or "abort",
            cached=0,
        )

    async def _health(self, body: None) -> dict[str, Any]:
        status, _ = await self.ask("GET", "/health")
        if status >= 400:
            raise EngineCoreDied(f"{self.name} answers /health with {status}")
        return {"engine": await self._started(), "running": self._flying.total(), "waiting": 0}

    # The transaction

    async def _pause(self, body: wire.Pause) -> dict[str, Any]:
        """Once nothing of this trainer is in flight; of others, where the server can be paused at all."""
        before, self._state = self._state, "paused"
        idle, seconds = lambda: not self._flying.total(), self.request_seconds
        await self._until(idle, "requests in flight to end", on=self.name, seconds=seconds)
        if self._takes_weights:
            await self._tell("/pause?mode=wait")
        self._paused_at = time.monotonic()
        return {"before": "stopped" if before == "stopped" else "serving"}

    async def _resume(self, body: Any) -> dict[str, Any]:
        paused = time.monotonic() - self._paused_at if self._state == "paused" else 0.0
        if self._takes_weights and self._state == "paused":
            await self._tell("/resume")
        self._state = "serving"
        self._changed.set()
        return {"step": self._step, "digest": self._digest, "seconds": paused}

    async def _set_version(self, body: wire.SetVersion) -> dict[str, Any]:
        self._step, self._digest, self._adapter = body.step or 0, body.digest, body.adapter
        self._changed.set()
        return {"engine": await self._started()}

    async def _stop(self, body: wire.Stop) -> dict[str, Any]:
        self._state = "stopped"
        if self._takes_weights:
            await self._tell("/pause?mode=abort")
        return {}

    # Adapters

    async def _adapters(self, body: None) -> dict[str, Any]:
        models = (await self.get(MODELS, Models)).data
        return {"loaded": [{"name": model.id} for model in models if model.parent], "in_place": False}

    async def _load(self, body: wire.LoadAdapter) -> dict[str, Any]:
        await self._tell(LOAD, {"lora_name": body.adapter_name, "lora_path": body.adapter_path})
        return {}

    async def _unload(self, body: wire.UnloadAdapter) -> dict[str, Any]:
        loaded = [entry["name"] for entry in (await self._adapters(None))["loaded"]]
        names = loaded if body.adapter_name is None else [body.adapter_name]
        if body.unless_used:
            names = [name for name in names if not self._flying[name]]
        for name in set(names).intersection(loaded):
            await self._tell(UNLOAD, {"lora_name": name})
        return {"unloaded": names}

    # Whole weights, by vLLM's weight transfer

    async def _join(self, body: wire.StartReceiver) -> dict[str, Any]:
        place = urlsplit(body.init_method)
        info = {
            "master_address": place.hostname, "master_port": place.port, "rank_offset": body.first_rank,
            "world_size": body.world_size,
        }  # fmt: skip
        self._joining = asyncio.create_task(self._tell(INIT, {"init_info": info}), name=f"{self.name} joins")
        done, _ = await asyncio.wait({self._joining}, timeout=REFUSAL_SECONDS)
        if done and (error := self._joining.exception()):
            raise EngineError(f"{error}; it must have been started by\n  {START_TRANSFER}") from error
        return {}

    async def _receive(self, body: wire.Receive) -> dict[str, Any]:
        """Take one publish, and then answer the probe: nothing else of this trainer is asked before it has passed."""
        if self._joining is not None:
            await self._joining
        names, shapes, dtypes = zip(*body.manifest, strict=True)
        await self._tell("/start_weight_update")
        await self._tell(UPDATE, {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}})
        await self._tell("/finish_weight_update")
        await self._tell("/resume")
        return {}

    async def _leave_group(self, body: Any) -> dict[str, Any]:
        if self._joining is not None:
            self._joining.cancel()
        await self.ask("POST", "/shutdown_weight_transfer_engine", {})  # which older versions do not have
        return {}
