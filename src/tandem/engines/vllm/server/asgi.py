"""ASGI helpers of the routes: request bodies, responses, errors, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from tandem import doors
from tandem.engines.vllm.protocol import Refusal
from tandem.engines.vllm.server.frontend import Stopped

log = logging.getLogger("vllm.tandem")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

KEY = "TANDEM_API_KEY"
"""Environment variable of the key that every request but /health must bear."""
HOST = "TANDEM_HOST"
"""Environment variable of the address that it listens on, a name of which it is known by."""
MOST = 64 << 20
"""Bytes of the largest body: requests for many answers, and those of vLLM's own routes that have pictures."""

_STATUS = {
    # By name: vLLM's releases give these classes other bases, and the engine's process may have any of them.
    "VLLMNotFoundError": 404,
    "VLLMUnprocessableEntityError": 422,
    "VLLMClientError": 400,
    "EngineDeadError": 503,
    "MsgspecError": 503,  # an answer of its core that cannot be read, after which vLLM reads no more
    "Stopped": 503,
    "TimeoutError": 504,
    "ValueError": 400,  # parameters that vLLM refuses
}


class ClientDisconnected(Exception):
    """The client disconnected before the response."""


def authorise(scope: Scope, path: str) -> None:
    """Raise Refusal unless the request bears the key, or where there is none, is no page's in a browser.

    /health needs no key.
    """
    key, headers = os.environ.get(KEY), doors.headers_of(scope)
    if key:
        if path != "/health" and not hmac.compare_digest(
            headers.get("authorization", "").encode("latin-1"), f"Bearer {key}".encode()
        ):
            raise Refusal(401, "this engine wants its API key, as in 'Authorization: Bearer KEY'")
        return
    method = scope.get("method", "GET")
    reads = scope["type"] == "http" and method in ("GET", "HEAD")
    why = doors.from_a_page(method, headers, acts=not reads, names=[os.environ.get(HOST, "")])
    if why := why or ("" if reads else doors.without_json(headers)):
        raise Refusal(403, f"{why}: an engine takes one by engine.api_key_variable")


async def read(receive: Receive) -> bytes:
    """The whole body.

    Raises:
        Refusal: it is longer than ``MOST`` bytes.
        ClientDisconnected: the client went away.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        if len(body) > MOST:
            raise Refusal(413, f"the request's body is larger than {MOST >> 20} MiB")
        if not message.get("more_body"):
            return bytes(body)


async def unless(work: Awaitable[T], *ends: Awaitable[Any]) -> T:
    """Wait for work, or for the first of ``ends``, which cancels the work and raises why."""
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(end) for end in ends]
    try:
        done, _ = await asyncio.wait((task, *others), return_when=asyncio.FIRST_COMPLETED)
        return (task if task in done else done.pop()).result()
    finally:
        for future in (task, *others):
            future.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)  # what was sampled is aborted by now


async def disconnected(receive: Receive) -> None:
    """Wait for the client to go away, and raise that; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnected


def replayed(body: bytes, receive: Receive, stopped: Callable[[], Awaitable[Any]]) -> Receive:
    """A ``receive`` for vLLM's own routes: the body that was read already, then the client's disconnection.

    Routes of vLLM abort what they sample when their client goes away, so that is what they are told of a stop too.
    """
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        with contextlib.suppress(ClientDisconnected, Stopped):
            await unless(disconnected(receive), stopped())
        return {"type": "http.disconnect"}

    return again


async def answer(send: Send, value: Any, status: int = 200, kind: bytes = b"application/json") -> None:
    """Send a JSON answer."""
    body = msgspec.json.encode(value)
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, error: Exception) -> None:
    """Answer with an error, as RFC 9457's problem+json."""
    if isinstance(error, ClientDisconnected):
        return
    status, title, detail = problem(error)
    document = {"status": status, "title": title, "detail": detail}
    await answer(send, document, status, b"application/problem+json")


def problem(error: Exception) -> tuple[int, str, str]:
    """The one place where errors become statuses: status, title and detail."""
    if type(error).__name__ == "EngineGenerateError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # vLLM's wrapper, which says nothing itself
    known = (_STATUS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _STATUS)
    status = error.status if isinstance(error, Refusal) else next(known, 500)
    if status == 500:
        log.error("a request failed", exc_info=error)
    detail = str(error) or type(error).__name__
    if isinstance(error, Stopped):
        detail = f"the engine is stopped: {detail}"
    return status, type(error).__name__, detail
