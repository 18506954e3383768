"""A broker that answers at a port of this process, and a client that says exactly what it is told to."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from tandem_broker.journal import Ledger
from tandem_broker.protocol.messages import EnvRegistration, RunParameters
from tandem_broker.queue.records import StoreOptions
from tandem_broker.queue.store import GroupQueue
from tandem_broker.server.app import BrokerServer
from tandem_broker.server.serving import serving

T = TypeVar("T")
RUN = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 512,
    "checkpoint_dir": "/tmp/c",
    "save_checkpoint_interval": 10,
    "starting_step": 0,
    "num_steps": 100,
}
ENV = {"max_token_length": 256, "desired_name": "e", "weight": 1.0, "group_size": 4}


def run_parameters(**changed: Any) -> RunParameters:
    """What a trainer registers: ``RUN`` with changes."""
    return RunParameters(**{**RUN, **changed})


def env_spec(name: str, max_token_length: int = 8, **changed: Any) -> EnvRegistration:
    """What an environment registers: groups of one sequence, and no share."""
    spec = {"weight": 1.0, "group_size": 1, **changed}
    return EnvRegistration(desired_name=name, max_token_length=max_token_length, **spec)


def some(value: T | None) -> T:
    """The batch or the registration that there must be."""
    assert value is not None
    return value


def group(size: int = 4, **fields: Any) -> dict[str, Any]:
    """A valid group."""
    tokens = [[5, 1, 2]] * size
    return {"tokens": tokens, "masks": [[-100, 1, 2]] * size, "scores": [float(i) for i in range(size)]} | fields


@dataclass
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """Calls of one broker."""

    url: str
    broker: BrokerServer
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    async def call(self, method: str, path: str, body: Any = None, zipped: bool = False, **headers: str) -> Reply:
        """``body``: bytes and text go as they are, anything else as JSON. ``headers`` with _ for -."""
        sent_headers = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if body is not None and not isinstance(body, bytes):
            body = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        if body is not None:
            sent_headers = {"Content-Type": "application/json", **sent_headers}
        if zipped:
            body, sent_headers["Content-Encoding"] = gzip.compress(body), "gzip"
        large = isinstance(body, bytes) and len(body) > 1 << 20  # which aiohttp wants as a file
        async with self.session.request(
            method,
            self.url + path,
            data=io.BytesIO(body) if large else body,
            headers=sent_headers,
            skip_auto_headers=["Content-Type"],
        ) as response:
            return Reply(response.status, response.headers, await response.read())

    async def get(self, path: str, body: Any = None, **headers: str) -> Reply:
        return await self.call("GET", path, body, **headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        return await self.call("POST", path, body, **headers)

    async def begin(self, **run: Any) -> None:
        """A trainer registers and polls, so that environments may register."""
        assert (await self.post("/register", RUN | run)).status == 200
        assert (await self.get("/batch")).status == 200

    async def env(self, **spec: Any) -> int:
        """Registers an environment."""
        env_id: int = (await self.post("/register-env", ENV | spec)).json["env_id"]
        return env_id


@asynccontextmanager
async def served(
    *,
    options: StoreOptions | None = None,
    ledger: Ledger | None = None,
    **more: Any,
) -> AsyncIterator[Client]:
    broker = BrokerServer(GroupQueue(options) if ledger is None else ledger.store, **more)
    async with serving(broker, "127.0.0.1", 0) as url, aiohttp.ClientSession(auto_decompress=False) as session:
        yield Client(url, broker, session)


def play(scene: Callable[[Client], Awaitable[None]], **how: Any) -> None:
    """Run a scene against a fresh broker."""

    async def run() -> None:
        async with served(**how) as client:
            await asyncio.wait_for(scene(client), 60)

    asyncio.run(run())
