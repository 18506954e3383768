"""The broker over HTTP: Atropos' paths, and beside them leases, metrics and a page for people.

One process, one event loop, one store. Handlers change the store without awaiting in between; an answer leaves only
after the ledger has what it promises.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import ipaddress
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from importlib import resources
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web

from tandem import __version__, doors
from tandem.broker.journal.payloads import read
from tandem.broker.protocol import messages, wire
from tandem.broker.protocol.lenient import Malformed
from tandem.broker.queue.records import Busy, EnvSpec, GroupEntry, GroupRefused, Receipt, ServedBatch
from tandem.broker.queue.store import GroupQueue
from tandem.broker.server.bodies import MESSAGE_BYTES, Bodies, BodyLimits, RequestRejected, wants
from tandem.broker.server.keys import Keys, Role, may, scoped
from tandem.broker.server.meter import Meter
from tandem.broker.server.resent import Resent
from tandem.broker.server.routes import ROUTES, Route, document
from tandem.errors import BrokerError
from tandem.printable import named

log = logging.getLogger(__name__)

GZIP_BYTES = 1000
"""Answers of this size and more are compressed for clients elsewhere that accept it."""

EMPTY_EXAMPLE = dict.fromkeys(
    (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    ),
    (),
)
"""``GET /latest_example`` before there is one."""


def reply(request: web.Request, value: Any) -> web.Response:
    """A message in the encoding that the client asks for."""
    encoding = wants(request)
    return encoded(wire.write(value, encoding), encoding)


def encoded(body: bytes, encoding: wire.Encoding, status: int = 200) -> web.Response:
    """A message that is bytes already."""
    return web.Response(body=body, status=status, content_type=f"application/{encoding}")


def page(name: str) -> web.Response:
    """A page of this package; it can load nothing from elsewhere and run no script but its own."""
    text, policy = _asset(name)
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})


@cache
def _asset(name: str) -> tuple[str, str]:
    text = resources.files("tandem.broker.server").joinpath(name).read_text(encoding="utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return text, (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def done(is_done: bool, reason: str) -> dict[str, str]:
    """Atropos' way to say whether something was done: with a status that is no HTTP status."""
    return {"status": "success"} if is_done else {"status": "failure", "error": reason}


def lease(batch: ServedBatch) -> dict[str, Any]:
    """Metadata of a leased batch: the lease's id, and a version for each group, in their order."""
    return {
        "batch": batch.id,
        "step": batch.step,
        "expires": batch.expires,
        "ids": [entry.id for entry in batch.entries],
        "versions": [entry.version for entry in batch.entries],
    }


def idempotency_key(request: web.Request) -> str | None:
    """The key by which a request is known when it comes again.

    Raises:
        RequestRejected: 400, it is empty or too long.
    """
    key = request.headers.get("Idempotency-Key")
    if key is not None and not re.fullmatch(r"[!-~]{1,200}", key):
        raise RequestRejected(400, "an Idempotency-Key has 1 to 200 visible ASCII characters")
    return key


def number(request: web.Request, name: str, kind: type[int] | type[float]) -> Any:
    """A number of the query; None if it is not there.

    Raises:
        RequestRejected: 422, it is none, or negative.
    """
    text = request.query.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 2**53:
        raise RequestRejected(422, f"{name} takes a number >= 0, not {text[:40]!r}")
    return value


async def compressed(request: web.Request, response: web.Response) -> web.Response:
    """A large answer as gzip for a client elsewhere: on one machine compressing costs far more than it saves."""
    accepts = "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "").lower()
    body = response.body
    if not accepts or not isinstance(body, bytes) or len(body) < GZIP_BYTES or is_near(request.remote):
        return response
    response.body = await asyncio.to_thread(gzip.compress, body, 1)
    response.headers[hdrs.CONTENT_ENCODING] = "gzip"
    return response


def is_near(address: str | None) -> bool:
    """True if an address is this machine's loopback."""
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_SECONDS = 5.0
"""When to come back after a failure of our own, such as a full disk."""


async def _nothing(more: Callable[[], bool] | None = None) -> None:
    """Without a ledger nothing is waited for."""


class BrokerServer:
    """Routes over a store."""

    def __init__(
        self,
        store: GroupQueue,
        *,
        committed: Callable[..., Awaitable[None]] = _nothing,
        limits: BodyLimits | None = None,
        keys: Keys | None = None,
        host: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Serve a store.

        Args:
            store: changed by this broker alone.
            committed: waits until everything that the store told its journal so far is on disk; if it is given what
                tells whether more is on its way, it may write that with it.
            limits: bounds on bodies.
            keys: API keys. Without any, requests that pages in a browser make are refused (``tandem.doors``).
            host: a name by which it is reached, beside its addresses and this machine's name.
            clock: seconds since 1970.
        """
        self.store = store
        """What is served."""
        self.bodies = Bodies(limits or BodyLimits())
        """Reads requests."""
        self.meter = Meter()
        """What was counted."""
        self.keys = keys or Keys()
        """API keys of the callers."""
        self._names = (host,) if host else ()
        self._committed = committed
        self._clock = clock
        self._resent = Resent()
        self._resent.restored((item.entry for item in store.waiting), clock())
        self._polled = 0.0
        self._failure: dict[str, Any] | None = None
        self._started = clock()

    def application(self) -> web.Application:
        """The routes, ready to be run. Give its runner ``auto_decompress=False``: bodies are inflated here."""
        app = web.Application(middlewares=[self._answered])
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._guarded(getattr(self, f"_{route.handler}"), route))
        return app

    def _guarded(self, handler: Handler, route: Route) -> Handler:
        """A handler behind its key, or where there is none, behind the question whether a page in a browser asks."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if route.role is not None:
                self._owner(request, route.role)
            if not self.keys.trainer:
                why = doors.from_a_page(request.method, request.headers, acts=route.acts, names=self._names)
                if why:
                    raise RequestRejected(403, why)
            return await handler(request)

        return guarded

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every way in which a request can end, counted."""
        start = time.perf_counter()
        try:
            response = await handler(request)
        except Malformed as error:
            self.meter.refused[error.problems[0].type] += 1
            response = encoded(wire.write({"detail": error.problems}), "json", 422)
        except GroupRefused as error:
            self.meter.refused["impossible"] += 1
            response = RequestRejected(422, str(error)).response()
        except Busy as error:
            # Atropos' environments drop a group at any 4xx but try again at a 5xx; clients that give a key know both.
            self.meter.refused["busy"] += 1
            status = 429 if "Idempotency-Key" in request.headers else 503
            response = RequestRejected(status, str(error), retry_after=error.retry_after).response()
        except RequestRejected as error:
            self.meter.refused[f"http_{error.status}"] += 1
            response = error.response()
        except web.HTTPException as error:
            response = encoded(wire.write({"detail": error.reason}), "json", error.status)
            if allow := error.headers.get("Allow"):
                response.headers["Allow"] = allow
        except BrokerError as error:
            log.error("%s", error)
            self._failure = {"error": str(error), "at": self._clock()}
            response = RequestRejected(503, str(error), retry_after=RETRY_SECONDS).response()
        except ConnectionError:  # a client that went away within a request leaves no trace in the log
            response = RequestRejected(400, "the connection broke").response()
        resource = request.match_info.route.resource
        self.meter.request(resource.canonical if resource else "(none)", response.status, time.perf_counter() - start)
        if not response.prepared:
            response.headers["Tandem"] = __version__
        return response

    async def _message(self, request: web.Request, kind: type[T]) -> T:
        """A request's body that is no group."""
        return await self.bodies.read(
            request, lambda body, encoding: wire.read(body, kind, encoding), most=MESSAGE_BYTES
        )

    async def _root(self, request: web.Request) -> web.StreamResponse:
        is_person = "text/html" in request.headers.get("Accept", "")
        return page("broker.html") if is_person else reply(request, {"message": "AtroposLib API"})

    async def _docs(self, request: web.Request) -> web.StreamResponse:
        return page("docs.html")

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return encoded(wire.write(document()), "json")

    async def _register(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.RunParameters)
        uuid = self.store.register(body)
        await self._committed()
        if wants(request) == "msgpack":
            return reply(request, {"uuid": str(uuid)})  # MessagePack has no ints of 128 bits
        return encoded(wire.write(messages.Registered(uuid=uuid)), "json")

    async def _info(self, request: web.Request) -> web.StreamResponse:
        run = self.store.run
        if run is None:
            return reply(request, messages.Info(batch_size=-1, max_token_len=-1))
        return reply(request, messages.Info(batch_size=run.batch_size, max_token_len=run.max_token_len))

    async def _wandb_info(self, request: web.Request) -> web.StreamResponse:
        run = self.store.run
        group, project = (None, None) if run is None else (run.wandb_group, run.wandb_project)
        return reply(request, messages.WandbInfo(group=group, project=project))

    async def _register_env(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.EnvRegistration)
        spec = EnvSpec(
            name=named(body.desired_name),
            max_token_length=body.max_token_length,
            weight=body.weight,
            group_size=body.group_size,
            min_batch_allocation=body.min_batch_allocation,
        )
        key = scoped(self._owner(request), idempotency_key(request))
        accepted = self.store.register_env(spec, self._clock(), key=key, owner=self._owner(request))
        if accepted is None:
            return reply(request, {"status": "wait for trainer to start"})
        await self._committed()
        return reply(request, accepted)

    async def _disconnect_env(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.EnvName)
        self._owned(request, body.env_id)
        if not self.store.disconnect(body.env_id, self._clock()):
            return reply(request, {"status": "failure", "error": f"no environment has the id {body.env_id}"})
        await self._committed()
        return reply(request, {"status": "success"})

    async def _status_env(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.EnvName)
        self._owned(request, body.env_id)
        return reply(request, self.store.status_env(body.env_id, self._clock()))

    def _owner(self, request: web.Request, role: Role = "environment") -> str:
        """Whose key a request bears; raises RequestRejected if it bears none for this role."""
        return self.keys.check(request.headers.get("Authorization", ""), role)

    def _owned(self, request: web.Request, env_id: int | None) -> None:
        """See that a request may speak for an environment.

        Raises:
            RequestRejected: 403, it was registered with another key.
        """
        if not may(self._owner(request), self.store.tenants.of(env_id).owner):
            raise RequestRejected(403, f"environment {env_id} was registered with another key")

    async def _scored_data(self, request: web.Request) -> web.StreamResponse:
        submission = await self.bodies.read(request, wire.read_group)
        (receipt,) = await self._put([submission], request)
        more = {"buffer_size": receipt.buffered} if receipt.kind == "buffered" else {}
        return reply(request, {"status": "buffered" if more else "received", **more})

    async def _scored_data_list(self, request: web.Request) -> web.StreamResponse:
        most = self.bodies.limits.list_groups
        submissions = await self.bodies.read(request, partial(wire.read_groups, most=most))
        receipts = await self._put(submissions, request)
        answer: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
        buffered = [receipt for receipt in receipts if receipt.kind == "buffered"]
        if buffered:
            answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1].buffered}
        return reply(request, answer)

    async def _put(self, submissions: Sequence[wire.Submission], request: web.Request) -> list[Receipt]:
        """Hand groups to the store, all or none, and wait until they are safe."""
        for env_id in {submission.env_id for submission in submissions}:
            self._owned(request, env_id)
        key, now = scoped(self._owner(request), idempotency_key(request)), self._clock()
        entries = [
            GroupEntry(
                id=secrets.token_hex(12),
                env=submission.env_id,
                size=submission.size,
                version=submission.version,
                received=now,
                payload=submission.payload,
            )
            for submission in submissions
        ]
        keys = [key] if len(entries) == 1 else [None if key is None else f"{key}/{i}" for i in range(len(entries))]
        payloads = [submission.payload for submission in submissions]
        again = {} if key is not None else self._resent.among(payloads, now)
        fresh = [(entry, keys[i]) for i, entry in enumerate(entries) if i not in again]
        taken = iter(self.store.put_all(fresh, now))
        self._resent.forget(again.values())
        self.store.counts["duplicate"] += len(again)
        self.meter.accepted_bytes += sum(entry.num_bytes for entry, _ in fresh)
        await self._committed(self.bodies.coming)
        if key is None and (request.transport is None or request.transport.is_closing()):
            self._resent.note(payloads, self._clock())
        return [Receipt(kind="duplicate") if i in again else next(taken) for i in range(len(entries))]

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        self._polled = now = self._clock()
        if self.store.run is None:
            message = "Trainer not registered. Call /register first."
            return reply(request, {"status": "error", "message": message, "batch": []})
        leased = number(request, "lease", float)
        batch = self.store.take(
            now,
            trainer=request.remote,
            lease=leased is not None,
            seconds=leased,
            policy=number(request, "policy", int),
            max_lag=number(request, "max_lag", int),
        )
        encoding = wants(request)
        if batch is None:
            await self._committed()
            return encoded(wire.write_batch(None, encoding), encoding)
        try:
            payloads = [wire.recode(payload, encoding) for payload in await read(batch.entries)]
            await self._committed()
            body = wire.write_batch(payloads, encoding, None if leased is None else lease(batch))
            response = await compressed(request, encoded(body, encoding))
            response.headers["Tandem"] = __version__
            if leased is not None:
                response.headers["Tandem-Batch"] = batch.id
            if request.transport is not None:
                # Sent is what has left this process: a kill cannot cut it off.
                request.transport.set_write_buffer_limits(0)
            await response.prepare(request)
            await response.write_eof()
        except BaseException:  # its client is gone, or it cannot be read: it returns to the queue
            self.store.release(batch.id, self._clock())
            raise
        self.store.delivered(batch.id)
        if leased is None:
            self.store.acknowledge(batch.id, self._clock())  # nothing else will: it is out
        self.meter.served_batches += 1
        self.meter.served_groups += len(payloads)
        self.meter.served_bytes += len(body)
        for entry in batch.entries:
            self.meter.lag.add(max(0, self.store.policy_step - (entry.version or 0)))
        return response

    async def _acknowledge(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.BatchName)
        outcome = self.store.acknowledge(body.batch, self._clock())
        await self._committed()
        return reply(request, done(bool(outcome), outcome.reason))

    async def _renew(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.BatchName)
        is_renewed = self.store.renew(body.batch, self._clock())
        return reply(request, done(is_renewed, f"no batch {body.batch} is leased"))

    async def _release(self, request: web.Request) -> web.StreamResponse:
        body = await self._message(request, messages.BatchName)
        is_released = self.store.release(body.batch, self._clock())
        await self._committed()
        return reply(request, done(is_released, f"no batch {body.batch} is leased"))

    async def _status(self, request: web.Request) -> web.StreamResponse:
        report = self.store.status(self._clock())
        answer: dict[str, Any] = {"current_step": report.step, "queue_size": report.queued_groups}
        if "detail" in request.query:
            answer["detail"] = self._detail(report)
        return reply(request, answer)

    def _detail(self, report: Any) -> dict[str, Any]:
        now = self._clock()
        return {
            **msgspec.to_builtins(report),
            "now": now,
            "uptime": now - self._started,
            "polled": self._polled,
            "failure": self._failure,
            **self.meter.detail(),
            "received_bytes": self.bodies.received,
            "version": __version__,
        }

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text = self.meter.prometheus(self.store.status(self._clock()), self.bodies.received)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _latest_example(self, request: web.Request) -> web.StreamResponse:
        if self.store.latest is None:
            return reply(request, EMPTY_EXAMPLE)
        encoding = wants(request)
        (payload,) = await read([self.store.latest])
        return await compressed(request, encoded(wire.recode(payload, encoding), encoding))

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        self.store.reset()
        await self._committed()
        return web.Response(text="Reset successful")
