"""Plain ASGI, as little of it as the routes need: bodies, answers, refusals, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from tandem.engines._vllm_frontend import Stopped
from tandem.engines._vllm_wire import Refused

log = logging.getLogger("vllm.tandem")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

KEY = "TANDEM_API_KEY"
"""Environment variable of the key that every request but /health must bear."""
MOST = 64 << 20
"""Bytes of the largest body that routes of ours read."""

_STATUS = {
    # By name: vLLM's releases give these classes other bases, and the engine's process may have any of them.
    "VLLMValidationError": 400,
    "VLLMNotFoundError": 404,
    "VLLMUnprocessableEntityError": 422,
    "VLLMClientError": 400,
    "EngineDeadError": 503,
}


class Gone(Exception):
    """The client went away, so nobody reads the answer."""


def authorise(scope: Scope) -> None:
    """Raise Refused unless the request bears the key, where there is one."""
    key = os.environ.get(KEY)
    if not key:
        return
    given = dict(scope["headers"]).get(b"authorization", b"")
    if not hmac.compare_digest(given, f"Bearer {key}".encode()):
        raise Refused(401, "this engine wants its API key, as in 'Authorization: Bearer KEY'")


async def read(receive: Receive, most: int | None = MOST) -> bytes:
    """The whole body.

    Raises:
        Refused: it is longer than ``most`` bytes.
        Gone: the client went away.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if most is not None and size > most:
            raise Refused(413, f"the request's body is larger than {most >> 20} MiB")
        if not message.get("more_body"):
            return b"".join(parts)


async def unless(work: Awaitable[T], *ends: Awaitable[Any]) -> T:
    """Wait for work, or for the first of ``ends``, which cancels the work and raises why.

    Raises:
        Gone: one of ``ends`` returned without an error of its own.
    """
    mine = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait((mine, *others), return_when=asyncio.FIRST_COMPLETED)
        if mine.done():
            return mine.result()
        for other in others:
            if other.done():
                other.result()
        raise Gone
    finally:
        for future in (mine, *others):
            future.cancel()
        await asyncio.gather(mine, *others, return_exceptions=True)  # what was sampled is aborted by now


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone away; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def given(body: bytes, receive: Receive, stopped: Callable[[], Awaitable[Any]]) -> Receive:
    """A ``receive`` for vLLM's own routes: the body that was read already, then the client's disconnection.

    Routes of vLLM abort what they sample when their client goes away, so that is what they are told of a stop too.
    """
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        with contextlib.suppress(Stopped):
            await unless(disconnected(receive), stopped())
        return {"type": "http.disconnect"}

    return again


def answers_of(body: bytes) -> int:
    """How many answers a body asks for; 1 where vLLM itself must say what is wrong."""
    try:
        number = json.loads(body)["n"]
    except (ValueError, TypeError, KeyError):
        return 1
    return number if isinstance(number, int) and number > 0 else 1


def salted(body: bytes, salt: str) -> bytes:
    """The body with a cache salt, its own one mixed in; as it is where vLLM itself must say what is wrong."""
    try:
        asked = json.loads(body)
    except ValueError:
        return body
    if not isinstance(asked, dict):
        return body
    own = asked.get("cache_salt")
    if own is not None and (not isinstance(own, str) or not own):
        return body
    if own:  # as a digest, for the length and the characters of a salt are limited
        salt = f"{salt}-{hashlib.blake2b(own.encode(), digest_size=16).hexdigest()}"
    return json.dumps({**asked, "cache_salt": salt}).encode()


async def answer(
    send: Send, value: Any, status: int = 200, kind: bytes = b"application/json", headers: Any = ()
) -> None:
    """Send a JSON answer."""
    body = msgspec.json.encode(value)
    more = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": more})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, error: Exception) -> None:
    """Answer with an error, as RFC 9457's problem+json."""
    if isinstance(error, Gone):
        return
    status, title, said = problem(error)
    headers = error.headers if isinstance(error, Refused) else ()
    told = {"status": status, "title": title, "detail": said}
    await answer(send, told, status, b"application/problem+json", headers)


def problem(error: Exception) -> tuple[int, str, str]:
    """The one place where errors become statuses: status, title and detail."""
    if type(error).__name__ == "EngineGenerateError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # vLLM's wrapper, which says nothing itself
    status = _status(error)
    if status == 500:
        log.error("a request failed", exc_info=error)
    said = str(error) or type(error).__name__
    if isinstance(error, Stopped):
        said = f"the engine is stopped: {said}"
    return status, type(error).__name__, said


def _status(error: Exception) -> int:
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, Stopped):
        return 503
    for cls in type(error).__mro__:
        if cls.__name__ in _STATUS:
            return _STATUS[cls.__name__]
    if isinstance(error, TimeoutError):
        return 504
    return 400 if isinstance(error, ValueError) else 500  # ValueError: parameters that vLLM refuses
