"""The broker over HTTP: Atropos' paths, and beside them leases, and everything that is known for people.

One process, one event loop, one store. Handlers change the store without awaiting in between; an answer leaves only
after the ledger has what it promises.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tandem import __version__, doors
from tandem.errors import BrokerError
from tandem.printable import named
from tandem_broker.protocol import messages, wire
from tandem_broker.protocol.submission import GroupEntry, read_group, read_groups
from tandem_broker.protocol.wire import Malformed
from tandem_broker.queue.records import Busy, GroupRefused, Receipt, ServedBatch
from tandem_broker.queue.store import GroupQueue
from tandem_broker.server.bodies import MESSAGE_BYTES, Bodies, RequestRejected
from tandem_broker.server.keys import Keys, Role, may, scoped

log = logging.getLogger(f"tandem.{__name__}")

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_SECONDS = 5.0
"""When to come back to a broker that holds too much, or that failed, as with a full disk."""
UNSHOWN = {"overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs"}
ACTING = ("GET /batch", "GET /reset_data")
"""Routes that change something although they are a GET."""
EMPTY_EXAMPLE = dict.fromkeys(set(messages.FIELDS) - UNSHOWN, ())
"""``GET /latest_example`` before there is one."""


def reply(value: Any, status: int = 200) -> web.Response:
    """Answer with JSON; bytes are JSON already."""
    body = value if isinstance(value, bytes) else wire.write(value)
    return web.Response(body=body, status=status, content_type="application/json")


def outcome(reason: str) -> dict[str, str]:
    """Say in Atropos' way whether something was done, or why not: with a status that is no HTTP status."""
    return {"status": "failure", "error": reason} if reason else {"status": "success"}


def lease(batch: ServedBatch) -> dict[str, Any]:
    """Describe a leased batch: its name, and an id and a version for each group."""
    return {
        "batch": batch.id,
        "ids": [entry.id for entry in batch.entries],
        "versions": [entry.version for entry in batch.entries],
    }


def idempotency_key(request: web.Request) -> str | None:
    """Return the key by which a repeated request is known; raises RequestRejected (400) for a bad one."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not re.fullmatch(r"[!-~]{1,200}", key):
        raise RequestRejected(400, "an Idempotency-Key has 1 to 200 visible ASCII characters")
    return key


@dataclass(slots=True)
class BrokerServer:
    """Routes over a store."""

    store: GroupQueue
    """Changed by this broker alone."""
    _: KW_ONLY
    bodies: Bodies = field(default_factory=Bodies)
    """Reads what is sent; ended by who serves."""
    keys: Keys = field(default_factory=Keys)
    """API keys. Without any, requests that pages in a browser make are refused (``tandem.doors``)."""
    host: str = ""
    """A name by which it is reached, beside its addresses and this machine's name."""
    clock: Callable[[], float] = time.time
    """Seconds since 1970."""

    def application(self) -> web.Application:
        """Return the routes, ready to run. Give the runner ``auto_decompress=False``: bodies are inflated here."""
        routes: dict[Role | None, dict[str, Handler]] = {
            None: {"GET /": self._root},
            "environment": {
                "GET /info": self._info,
                "GET /wandb_info": self._wandb_info,
                "POST /register-env": self._register_env,
                "POST /disconnect-env": self._disconnect_env,
                "GET /status-env": self._status_env,
                "POST /scored_data": self._scored_data,
                "POST /scored_data_list": self._scored_data_list,
                "GET /status": self._status,
            },
            "trainer": {
                "POST /register": self._register,
                "GET /batch": self._batch,
                "POST /ack": self._of_a_lease(self.store.acknowledge),
                "POST /renew": self._of_a_lease(self.store.renew),
                "POST /release": self._of_a_lease(self.store.return_lease),
                "GET /latest_example": self._latest_example,
                "GET /reset_data": self._reset,
            },
        }
        app = web.Application(middlewares=[self._answered])
        for role, handlers in routes.items():
            for route, handler in handlers.items():
                method, path = route.split()
                guarded = self._guarded(handler, role, acts=method == "POST" or route in ACTING)
                app.router.add_route(method, path, guarded)
        return app

    def _guarded(self, handler: Handler, role: Role | None, acts: bool) -> Handler:
        """Put a handler behind its key or, where there are none, behind the question whether a web page asks."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if role is not None:
                self._owner(request, role)
            if not self.keys.trainer:
                why = doors.from_a_page(request.method, request.headers, acts=acts, names=(self.host,))
                if why:
                    raise RequestRejected(403, why)
            response = await handler(request)
            if acts and not response.prepared:  # what an answer promises is on disk before it leaves
                await self.store.journal.committed()
            return response

        return guarded

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every end of a request into an answer."""
        try:
            response = await handler(request)
        except Malformed as error:
            response = reply({"detail": [error.problem]}, 422)
        except GroupRefused as error:
            response = RequestRejected(422, str(error)).response()
        except Busy as error:
            # Atropos' environments drop a group at any 4xx but try again at a 5xx; clients that give a key know both.
            status = 429 if "Idempotency-Key" in request.headers else 503
            response = RequestRejected(status, str(error), retry_after=RETRY_SECONDS).response()
        except RequestRejected as error:
            response = error.response()
        except web.HTTPException as error:
            response = reply({"detail": error.reason}, error.status)
            if allow := error.headers.get("Allow"):
                response.headers["Allow"] = allow
        except BrokerError as error:
            log.error("%s", error)
            response = RequestRejected(503, str(error), retry_after=RETRY_SECONDS).response()
        except ConnectionError:  # a client that went away within a request leaves no trace in the log
            response = RequestRejected(400, "the connection broke").response()
        self.store.journal.flush()
        if not response.prepared:
            response.headers["Tandem"] = __version__
        return response

    # --- who asks, and with what ---

    async def _message(self, request: web.Request, kind: type[T]) -> T:
        """Read a body that is no group."""
        return await self.bodies.read(request, lambda body: wire.read(body, kind), most=MESSAGE_BYTES)

    def _owner(self, request: web.Request, role: Role = "environment") -> str:
        """Name whose key a request bears; raises RequestRejected if it bears none for this role."""
        return self.keys.check(request.headers.get("Authorization", ""), role)

    def _require_owner(self, request: web.Request, env_id: int | None) -> None:
        """Raise RequestRejected (403) if an environment was registered with another key."""
        if not may(self._owner(request), self.store.tenants.of(env_id).owner):
            raise RequestRejected(403, f"environment {env_id} was registered with another key")

    # --- the run ---

    async def _root(self, request: web.Request) -> web.StreamResponse:
        return reply({"message": "AtroposLib API"})

    async def _register(self, request: web.Request) -> web.StreamResponse:
        return reply({"uuid": self.store.register(await self._message(request, messages.RunParameters))})

    async def _info(self, request: web.Request) -> web.StreamResponse:
        run = self.store.run
        sizes = (-1, -1) if run is None else (run.batch_size, run.max_token_len)
        return reply(messages.Info(batch_size=sizes[0], max_token_len=sizes[1]))

    async def _wandb_info(self, request: web.Request) -> web.StreamResponse:
        run = self.store.run
        return reply({"group": run and run.wandb_group, "project": run and run.wandb_project})

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        self.store.reset()
        return web.Response(text="Reset successful")

    # --- environments ---

    async def _register_env(self, request: web.Request) -> web.StreamResponse:
        spec = await self._message(request, messages.EnvRegistration)
        spec = msgspec.structs.replace(spec, desired_name=named(spec.desired_name))
        owner = self._owner(request)
        key = scoped(owner, idempotency_key(request))
        accepted = self.store.register_env(spec, self.clock(), key=key, owner=owner)
        return reply(accepted or {"status": "wait for trainer to start"})

    async def _disconnect_env(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.EnvName)
        self._require_owner(request, body.env_id)
        is_known = self.store.disconnect(body.env_id, self.clock())
        return reply(outcome("" if is_known else f"no environment has the id {body.env_id}"))

    async def _status_env(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.EnvName)
        self._require_owner(request, body.env_id)
        return reply(self.store.status_env(body.env_id, self.clock()))

    async def _scored_data(self, request: web.Request) -> web.StreamResponse:
        (receipt,) = self._put([await self.bodies.read(request, read_group)], request)
        more = {"buffer_size": receipt.buffered} if receipt.kind == "buffered" else {}
        return reply({"status": "buffered" if more else "received", **more})

    async def _scored_data_list(self, request: web.Request) -> web.StreamResponse:
        receipts = self._put(await self.bodies.read(request, read_groups), request)
        answer: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
        if buffered := [receipt for receipt in receipts if receipt.kind == "buffered"]:
            answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1].buffered}
        return reply(answer)

    def _put(self, entries: Sequence[GroupEntry], request: web.Request) -> list[Receipt]:
        """Hand groups to the store, all or none."""
        for env_id in {entry.env for entry in entries}:
            self._require_owner(request, env_id)
        key, now = scoped(self._owner(request), idempotency_key(request)), self.clock()
        keys = [key] if len(entries) == 1 else [None if key is None else f"{key}/{i}" for i in range(len(entries))]
        return self.store.put_all(list(zip(entries, keys, strict=True)), now)

    # --- trainers ---

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        if self.store.run is None:
            message = "Trainer not registered. Call /register first."
            return reply({"status": "error", "message": message, "batch": []})
        query = wire.read(wire.write(dict(request.query)), messages.BatchQuery)
        is_leased = query.lease is not None
        batch = self.store.take(self.clock(), lease=query.lease, policy=query.policy, max_lag=query.max_lag)
        if batch is None:
            return reply({"batch": None})
        payloads = [entry.payload for entry in batch.entries]
        try:
            await self.store.journal.committed()
            response = await self._send(request, batch, payloads, is_leased)
        except BaseException:  # its client is gone: it returns to the queue
            self.store.return_lease(batch.id, self.clock())
            raise
        if not is_leased:
            self.store.acknowledge(batch.id, self.clock())  # nothing else will: it is out
        return response

    async def _send(
        self, request: web.Request, batch: ServedBatch, payloads: Sequence[bytes], is_leased: bool
    ) -> web.Response:
        """Send a batch and return once all of it has left this process, where a kill cannot cut it off."""
        response = reply(wire.write_batch(payloads, lease(batch) if is_leased else None))
        response.headers["Tandem"] = __version__
        if is_leased:
            response.headers["Tandem-Batch"] = batch.id
        if request.remote not in ("127.0.0.1", "::1"):  # on one machine compressing costs more than it saves
            response.enable_compression()
        if request.transport is not None:
            request.transport.set_write_buffer_limits(0)
        await response.prepare(request)
        await response.write_eof()
        return response

    def _of_a_lease(self, act: Callable[[str, float], str]) -> Handler:
        """What is done to the batch that a body names."""

        async def handler(request: web.Request) -> web.StreamResponse:
            body = await self._message(request, messages.BatchName)
            return reply(outcome(act(body.batch, self.clock())))

        return handler

    # --- people ---

    async def _status(self, request: web.Request) -> web.StreamResponse:
        report = self.store.status(self.clock())
        answer: dict[str, Any] = {"current_step": report["step"], "queue_size": report["queued_groups"]}
        if "detail" in request.query:
            answer["detail"] = {**report, "version": __version__}
        return reply(answer)

    async def _latest_example(self, request: web.Request) -> web.StreamResponse:
        latest = self.store.waiting.latest
        return reply(EMPTY_EXAMPLE if latest is None else latest.entry.payload)
