"""An engine's or a broker's HTTP server without a model, which stalls when it is told to.

python stalls_server.py engine PORT [MODEL]      as engine.urls or sync want it; samples random tokens
python stalls_server.py broker PORT              as Atropos' run-api; every batch is there at once
python stalls_server.py judge PORT               a chat model that grades
python stalls_server.py ... --port PORT ...      an engine, by vLLM's command line
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from stalls_rewards import strikes

if TYPE_CHECKING:  # torch is imported where it is needed: an engine is there at once
    from torch import Tensor

    from tandem.transport.collective import Member
    from tandem.transport.rendezvous import Rendezvous

VOCABULARY = 250
LOGPROB = -5.5


async def never() -> None:
    """Hang."""
    await asyncio.get_running_loop().create_future()


class Engine:
    """What the routes of one engine share."""

    def __init__(self) -> None:
        self.instance_id = f"boot {os.getpid()}"
        self.step, self.digest = -1, ""
        self.adapters: dict[str, Path] = {}
        self.held: dict[str, Tensor] = {}
        self.member: Member | None = None
        self.joined = ""
        self.manifest: list[Any] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        for path in ("/health", "/bridge/info", "/lora/status", "/nccl/status"):
            app.router.add_get(path, self.handle)
        for path in ("pause", "stop", "adopt", "stamp", "resume", "checksums", "probe"):
            app.router.add_post(f"/bridge/{path}", self.handle)
        for path in ("/lora/load", "/lora/unload", "/generate/many", "/nccl/start_receiver", "/nccl/receive"):
            app.router.add_post(path, self.handle)
        app.router.add_post("/nccl/stop_receiver", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        name = request.path.strip("/").replace("/", "_")
        if name == "generate_many":
            await self._stall(request)
            return web.Response(body=self.many(body))
        if strikes(f"{request.path} never answers"):
            await never()
        answer = await getattr(self, f"on_{name}")(body)
        if answer is None:
            return web.json_response({"detail": "not here"}, status=404)
        return web.json_response({"engine": self.instance_id, "step": self.step, "digest": self.digest, **answer})

    async def _stall(self, request: web.Request) -> None:
        if strikes("dead engine", after=4) or strikes("engine dies again and again", after=0):
            os._exit(1)
        if os.environ.get("STALL") == "engine dies again and again":
            os._exit(1)
        if strikes("stopped engine", after=4):
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.environ.get("STALL") == "engine never answers":
            strikes("engine never answers")
            await never()
        if strikes("engine answers half", after=4):
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(bytes([0, 0, 1, 0]))  # of a frame that never comes
            await never()

    async def on_health(self, body: Any) -> Any:
        return {"running": 0, "waiting": 0}

    async def on_bridge_info(self, body: Any) -> Any:
        worker = {"rank": 0, "pid": os.getpid(), "device": "cpu"}
        about = {"state": "running", "reason": "", "updates": 0, "running": 0, "adapter": None, "model": "m"}
        limits = {"context": 512, "logprobs": "processed_logprobs", "adapters": True}
        return {**about, **limits, "workers": [worker]}

    async def on_lora_status(self, body: Any) -> Any:
        return {"loaded": [], "in_place": None}

    async def on_lora_load(self, body: Any) -> Any:
        self.adapters[body["adapter_name"]] = Path(body["adapter_path"])
        return {}

    async def on_lora_unload(self, body: Any) -> Any:
        return {"unloaded": [body.get("adapter_name")]}

    async def on_bridge_pause(self, body: Any) -> Any:
        return {"before": "serving"}

    on_bridge_stop = on_bridge_adopt = on_bridge_pause

    async def on_bridge_stamp(self, body: Any) -> Any:
        self.step, self.digest = body["step"], body.get("digest", "")
        return {}

    async def on_bridge_resume(self, body: Any) -> Any:
        return {"seconds": 0.0}

    async def on_bridge_checksums(self, body: Any) -> Any:
        from safetensors.torch import load_file

        from tandem.engines.base import LoraAdapter
        from tandem.engines.vllm.adapters import AdapterWriter
        from tandem.transport.checksums import ChecksumCache, Shard

        if body.get("travels") == "adapter":
            folder = self.adapters[body["adapter"]]
            tensors = tuple(load_file(folder / "adapter_model.safetensors").items())
            stored = AdapterWriter().stored(LoraAdapter(config=body["config"], tensors=tensors))
        elif self.held:
            stored = list(self.held.items())
        else:
            return {"ranks": [{"unmapped": "a stand-in has no weights but those that it is sent"}]}
        sums = ChecksumCache().take(Shard(name, tensor) for name, tensor in stored)
        return {"ranks": [{f"{name}@0": f"{value:x}" for name, value in sums.items()}]}

    async def on_bridge_probe(self, body: Any) -> Any:
        scored = [LOGPROB] * (len(body["tokens"]) - 1)
        about = {"finish": "length", "cached": 0}
        return {"scored": scored, "tokens": [97], "logprobs": [LOGPROB], **about}

    def many(self, body: Any) -> bytes:
        """A frame for each answer."""
        from tandem.engines.vllm.protocol import Sampled, framed

        counts = [one["asked"]["max_tokens"] for one in body["prompts"] for _ in one["seeds"]]
        frames = b""
        for number, count in enumerate(counts):
            tokens = tuple(random.randrange(32, 127) for _ in range(count))
            logprobs, versions = (LOGPROB,) * count, [(self.step, count)]
            frames += framed(Sampled(number, tokens, logprobs, versions, finish="length", engine=self.instance_id))
        return frames

    async def on_nccl_start_receiver(self, body: Any) -> Any:
        from tandem.engines.vllm.protocol import StartReceiver
        from tandem.transport.rendezvous import Rendezvous

        request = StartReceiver(**body)
        host, _, port = request.init_method.removeprefix("tcp://").rpartition(":")
        meeting = Rendezvous(
            host=host,
            port=int(port),
            world=request.world_size,
            backend="gloo",
            name=request.name,
            seconds=request.seconds,
        )
        self.joined = ""
        if not strikes("peer never joins"):
            threading.Thread(target=self._join, args=(meeting, request.first_rank), daemon=True).start()
        return {}

    def _join(self, meeting: Rendezvous, rank: int) -> None:
        from tandem.transport.collective import Member

        self.member = Member.join(meeting, rank, who="a worker of the engine")
        self.joined = "connected"

    async def on_nccl_status(self, body: Any) -> Any:
        return {"status": self.joined or "connecting"}

    async def on_nccl_receive(self, body: Any) -> Any:
        self.manifest = body.get("manifest") or self.manifest
        if strikes("receiver never starts"):
            await never()
        await asyncio.to_thread(self._receive, body["bucket_bytes"])
        return {}

    def _receive(self, bucket_bytes: int) -> None:
        assert self.member is not None
        for tensors in self.member.receive([(n, s, d) for n, s, d in self.manifest], bucket_bytes):
            if strikes("peer stuck in a broadcast", after=1):
                threading.Event().wait()
            self.held |= {name: tensor.clone() for name, tensor in tensors}

    async def on_nccl_stop_receiver(self, body: Any) -> Any:
        return {}


class Broker:
    """Atropos' broker, which always has a batch."""

    def __init__(self) -> None:
        self.batch = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", self.root)
        app.router.add_post("/register", self.register)
        app.router.add_get("/info", self.info)
        app.router.add_get("/batch", self.next)
        app.router.add_get("/reset_data", self.root)
        return app

    async def root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API"})

    async def register(self, request: web.Request) -> web.Response:
        self.batch = (await request.json())["batch_size"]
        return web.json_response({"uuid": 1})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"batch_size": self.batch or 4, "max_token_len": 512})

    async def next(self, request: web.Request) -> web.Response:
        if strikes("broker gone", after=1):
            os._exit(1)
        if strikes("broker never answers", after=1):
            await never()
        if os.environ.get("STALL") == "broker never has a batch" and (strikes("broker never has a batch") or True):
            return web.json_response({"batch": None})
        tokens = [65, 66, 67, 68]
        group = {
            "tokens": [tokens] * 2, "masks": [[-100, -100, 67, 68]] * 2, "scores": [0.0, 1.0],
            "inference_logprobs": [[1.0, 1.0, -5.0, -5.0]] * 2,
        }  # fmt: skip
        return web.json_response({"batch": [group] * (self.batch // 2)})


class Judge:
    """A chat model that finds everything good."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.Response:
        if strikes("judge never answers", after=4):
            await never()
        return web.json_response({"choices": [{"message": {"content": "Score: 7"}}]})


def main() -> None:
    """Serve until ended."""
    words = sys.argv[1:]
    if words and words[0] in ("engine", "broker", "judge"):
        kind, port = words[0], int(words[1])
    else:
        kind, port = "engine", int(words[words.index("--port") + 1])
        if strikes("engine never healthy"):
            signal.pause()
        if os.environ.get("STALL") == "engine ends as it starts":
            strikes("engine ends as it starts")
            raise SystemExit("ValueError: no such model")
    app = {"engine": lambda: Engine().app(), "broker": lambda: Broker().app(), "judge": lambda: Judge().app()}[kind]()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
