"""The engine's end of a broadcast: joins the trainer's process group and takes publishes from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.protocol import Entry, Refusal
from tandem.engines.vllm.server.adapters import IN_PLACE_ID, Adapters
from tandem.engines.vllm.server.frontend import Frontend

MOST_JOINING = 8
"""Joins under way at a time: one that was given up keeps a thread until its own deadline."""


class Receiver:
    """The /nccl/* routes."""

    def __init__(self, frontend: Frontend, adapters: Adapters):
        self._frontend = frontend
        self._adapters = adapters
        self._announced: list[Entry] = []
        self._held: frozenset[str] | None = None
        self._connected = False

    async def start(self, request: wire.StartReceiver) -> Any:
        """POST /nccl/start_receiver: join in the background; /nccl/status tells how it went."""
        meeting = self._meeting(request)
        entries = _entries(request.param_metadata)
        await self._known(name for names in ((e[0] for e in entries), request.param_mappings) for name in names)
        under_way = max(rank.get("joining", 0) for rank in await self._frontend.rpc("tandem_connection"))
        if under_way >= MOST_JOINING:
            raise Refusal(
                429, f"{under_way} joins that were given up are still under way; each ends by its own `seconds`: wait"
            )
        self._announced, self._connected = entries, False
        await self._frontend.rpc("tandem_connect", json.dumps(meeting), request.first_rank)
        return await self.status()

    def _meeting(self, request: wire.StartReceiver) -> dict[str, Any]:
        address = re.fullmatch(r"tcp://\[?([^\]/]+)\]?:(\d{1,5})", request.init_method)
        if not address or not 0 < int(address[2]) < 2**16:
            raise Refusal(
                400, f"init_method must be tcp://host:port of rank 0, with a port to 65535, not {request.init_method!r}"
            )
        parallel = self._frontend.client.vllm_config.parallel_config
        workers = parallel.tensor_parallel_size * getattr(parallel, "pipeline_parallel_size", 1)
        if request.first_rank + workers > request.world_size:
            raise Refusal(
                400,
                f"first_rank {request.first_rank} and this engine's {workers} worker(s) are not within a world of "
                f"{request.world_size}",
            )
        return {
            "host": address[1],
            "port": int(address[2]),
            "world": request.world_size,
            "backend": request.backend,
            "name": request.name,
            "seconds": request.seconds,
        }

    async def _known(self, names: Iterable[str]) -> None:
        """See that what comes has a place here; adapters' tensors have theirs where they come.

        Raises:
            Refusal: something has none, or there is more than could have one.
        """
        every = list(names)
        if not every:
            return
        if self._held is None:
            self._held = frozenset(json.loads((await self._frontend.rpc("tandem_map"))[0]))
        weights = {name for name in every if ".lora_A." not in name and ".lora_B." not in name}
        if unknown := sorted(weights - self._held):
            raise Refusal(400, f"this engine has no weight {unknown[0]!r}; /bridge/state_dict_info names those it has")
        if len(every) - len(weights) > 4 * len(self._held):  # A and B of each, by both fields
            raise Refusal(400, f"{len(every)} tensors are announced, for a model of {len(self._held)}")

    async def status(self, _: None = None) -> Any:
        """GET /nccl/status: idle, connecting, connected, or error with its reason."""
        ranks = await self._frontend.rpc("tandem_connection")
        states = [rank["state"] for rank in ranks]
        worst = next(state for state in ("error", "idle", "connecting", "connected") if state in states)
        reasons = [rank["reason"] for rank in ranks if rank["reason"]]
        self._connected = worst == "connected"
        return {"status": worst, "error": "; ".join(reasons) or None, "ranks": ranks}

    async def stop(self, _: None) -> Any:
        """POST /nccl/stop_receiver: leave the group."""
        self._connected = False
        await self._frontend.rpc("tandem_disconnect")
        return await self.status()

    async def receive(self, request: wire.Receive) -> Any:
        """POST /nccl/receive: take one publish. If it breaks off, the engine is stopped: its weights are in doubt."""
        if self._frontend.state not in ("paused", "stopped"):
            raise Refusal(409, "receiving overwrites what is sampled from: pause first (POST /bridge/pause)")
        await self._known(name for name, _, _ in request.manifest)
        announced = request.manifest or self._announced
        if not announced:
            raise Refusal(400, "manifest is missing, and start_receiver was given no param_metadata: what comes?")
        if not self._connected and (state := (await self.status())["status"]) != "connected":
            raise Refusal(409, f"this engine is in no process group ({state}): start the receiver, and wait for it")
        lora_id = 0
        if request.config is not None:
            self._adapters.require_enabled()
            lora_id = IN_PLACE_ID
        self._announced = announced
        try:
            self._frontend.written = True
            arguments = json.dumps(announced), request.bucket_bytes, lora_id, json.dumps(request.config)
            await self._frontend.rpc("tandem_receive", *arguments)
        except Exception as error:
            await self._frontend.stop(f"a publish broke off while it was being received: {error}")
            raise
        if lora_id:
            self._adapters.written()
        return {"status": "ok", "tensors": len(self._announced)}


def _entries(metadata: msgspec.Raw) -> list[Entry]:
    """What ``param_metadata`` announces.

    Raises:
        Refusal: it is of neither form, or its parts do not agree; the message says where.
    """
    try:
        if b'"param_names"' not in memoryview(metadata).tobytes():
            named = msgspec.json.decode(metadata, type=dict[str, wire.Metadata])
            return [(name, meta.shape, meta.dtype.removeprefix("torch.")) for name, meta in named.items()]
        listed = msgspec.json.decode(metadata, type=wire.Listed)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(400, f"param_metadata is not as expected: {error}") from error
    names, shapes, dtypes = listed.param_names, listed.param_shapes, listed.param_dtypes
    if listed.num_params not in (None, len(names)):
        raise Refusal(400, f"param_metadata: num_params is {listed.num_params}, and param_names has {len(names)}")
    if missing := [name for name in names if name not in shapes or name not in dtypes]:
        raise Refusal(400, f"param_metadata: {missing[0]!r} is missing from param_shapes or param_dtypes")
    return [(name, shapes[name], dtypes[name].removeprefix("torch.")) for name in names]
