"""A broker a page long, Atropos' or ours, whose answers can be lost or refused, and which can restart empty."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import msgspec
from aiohttp import web

from tandem.http import RetryPolicy

T = TypeVar("T")


def quick(**options: Any) -> RetryPolicy:
    """Waits that a test does not notice."""
    return RetryPolicy(first_seconds=0.01, max_seconds=0.02, **options)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do it, in 30 seconds."""

    async def limited() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(limited())


class FakeBroker:
    """Keeps what it was given; ``faults[path]`` holds what befalls the next requests there, one each.

    ``cut`` breaks the connection before anything is done, ``lose`` after it was done; a number is answered as status.
    """

    def __init__(self, *, ours: bool) -> None:
        self.ours = ours
        self.batch_size = 8
        self.max_token_len = 512
        self.num_steps = 10
        self.started = True
        self.port = 0
        self.faults: dict[str, deque[Any]] = defaultdict(deque)
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.batches: deque[Any] = deque()
        self.empty()

    def empty(self) -> None:
        """As after a restart."""
        self.envs: dict[int, str] = {}
        self.keys: dict[str, int] = {}
        self.groups: list[dict[str, Any]] = []
        self.accepted: set[str] = set()
        self.step = 0
        self.queue = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.down()

    async def up(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def down(self) -> None:
        await self._runner.cleanup()

    async def _any(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        decoded = msgspec.json.decode(body) if body else None
        self.seen.append((request.path_qs, dict(request.headers), decoded))
        fault = self.faults[request.path].popleft() if self.faults[request.path] else None
        if fault == "cut":
            return self._broken(request)
        if isinstance(fault, int):
            return web.json_response({"detail": "a fault"}, status=fault, headers={"Retry-After": "0"})
        answer = getattr(self, f"_{request.method}_{request.path.strip('/').replace('-', '_')}")(request, decoded)
        if fault == "lose":
            return self._broken(request)
        status = answer.pop("http", 200)
        headers = {"Tandem": "1"} if self.ours else {}
        return web.Response(
            body=msgspec.json.encode(answer), status=status, content_type="application/json", headers=headers
        )

    def _broken(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _GET_(self, request: web.Request, body: Any) -> dict[str, Any]:
        return {"message": "AtroposLib API"}

    def _GET_info(self, request: web.Request, body: Any) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "max_token_len": self.max_token_len}

    def _POST_register(self, request: web.Request, body: Any) -> dict[str, Any]:
        return {"uuid": 2**63}

    def _POST_register_env(self, request: web.Request, body: Any) -> dict[str, Any]:
        if not self.started:
            return {"status": "wait for trainer to start"}
        key = request.headers.get("Idempotency-Key", f"{len(self.envs)}")
        id = self.keys.setdefault(key, len(self.envs))
        self.envs[id] = body["desired_name"]
        return {
            "status": "success", "env_id": id, "wandb_name": f"{body['desired_name']}_{id}", "checkpoint_dir": "",
            "starting_step": self.step, "checkpoint_interval": 1, "num_steps": self.num_steps,
        }  # fmt: skip

    def _GET_status_env(self, request: web.Request, body: Any) -> dict[str, Any]:
        if body["env_id"] not in self.envs:
            return {"http": 404 if self.ours else 500, "detail": "unknown"}
        return {
            "current_step": self.step, "queue_size": self.queue, "self_queue_size": self.queue, "max_group_size": 4,
            "unallocated_fraction": 1.0, "env_weight": 1.0,
        }  # fmt: skip

    def _POST_scored_data(self, request: web.Request, body: Any) -> dict[str, Any]:
        key = request.headers.get("Idempotency-Key")
        if key is None or key not in self.accepted:
            self.groups.append(body)
        if key is not None:
            self.accepted.add(key)
        return {"status": "received"}

    def _POST_disconnect_env(self, request: web.Request, body: Any) -> dict[str, Any]:
        return {"status": "success" if self.envs.pop(body["env_id"], None) else "failure"}

    def _GET_batch(self, request: web.Request, body: Any) -> dict[str, Any]:
        return self.batches.popleft() if self.batches else {"batch": None}

    def _POST_renew(self, request: web.Request, body: Any) -> dict[str, Any]:
        return self._POST_ack(request, body)

    def _POST_ack(self, request: web.Request, body: Any) -> dict[str, Any]:
        if body["batch"] == "b":
            return {"status": "success"}
        if body["batch"] == "mute":
            return {"status": "failure", "error": None}
        return {"status": "failure", "error": f"no batch is called {body['batch']}"}


async def until(true: Any, seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
