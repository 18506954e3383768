"""The engine's end of a broadcast: joins the trainer's process group and takes publishes from it."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.protocol import Entry, Refusal, parsed
from tandem.engines.vllm.server.adapters import IN_PLACE_ID, Adapters
from tandem.engines.vllm.server.frontend import Frontend

LOOK_SECONDS = 0.02
"""Between two looks whether every worker has joined."""


class Receiver:
    """The /nccl/* routes."""

    def __init__(self, frontend: Frontend, adapters: Adapters):
        self._frontend = frontend
        self._adapters = adapters
        self._announced: list[Entry] = []

    async def start(self, request: wire.StartReceiver) -> Any:
        """POST /nccl/start_receiver: join in the background; /nccl/status tells how it went."""
        place = urlsplit(request.init_method)
        if place.scheme != "tcp" or not place.hostname or not place.port:
            raise Refusal(400, f"init_method must be tcp://host:port of rank 0, not {request.init_method!r}")
        meeting = {"host": place.hostname, "port": place.port, "world": request.world_size}
        meeting |= {"backend": request.backend, "name": request.name, "seconds": request.seconds}
        self._announced = _entries(bytes(request.param_metadata))
        await self._frontend.rpc("tandem_connect", json.dumps(meeting), request.first_rank)
        return await self.status()

    async def status(self, _: None = None) -> Any:
        """GET /nccl/status: idle, connecting, connected, or error with its reason."""
        ranks = await self._frontend.rpc("tandem_connection")
        states = [rank["state"] for rank in ranks]
        worst = next(state for state in ("error", "idle", "connecting", "connected") if state in states)
        reasons = [rank["reason"] for rank in ranks if rank["reason"]]
        return {"status": worst, "error": "; ".join(reasons) or None, "ranks": ranks}

    async def stop(self, _: None) -> Any:
        """POST /nccl/stop_receiver: leave the group."""
        await self._frontend.rpc("tandem_disconnect")
        return await self.status()

    async def receive(self, request: wire.Receive) -> Any:
        """POST /nccl/receive: take one publish. If it breaks off, the engine is stopped: its weights are in doubt."""
        if self._frontend.state not in ("paused", "stopped"):
            raise Refusal(409, "receiving overwrites what is sampled from: pause first (POST /bridge/pause)")
        announced = request.manifest or self._announced
        if not announced:
            raise Refusal(400, "manifest is missing, and start_receiver was given no param_metadata: what comes?")
        while (state := (await self.status())["status"]) == "connecting":
            await asyncio.sleep(LOOK_SECONDS)
        if state != "connected":
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


def _entries(metadata: bytes) -> list[Entry]:
    """What ``param_metadata`` announces, in either form."""
    if b'"param_names"' not in metadata:
        named = parsed(metadata, dict[str, wire.Metadata])
        return [(name, meta.shape, meta.dtype.removeprefix("torch.")) for name, meta in named.items()]
    listed = parsed(metadata, wire.Listed)
    shapes, dtypes = listed.param_shapes, listed.param_dtypes
    if missing := [name for name in listed.param_names if name not in shapes or name not in dtypes]:
        raise Refusal(400, f"param_metadata: {missing[0]!r} is missing from param_shapes or param_dtypes")
    return [(name, shapes[name], dtypes[name].removeprefix("torch.")) for name in listed.param_names]
