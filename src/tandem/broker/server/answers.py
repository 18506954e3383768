"""What the broker sends back."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import ipaddress
import math
import re
from functools import cache
from importlib import resources
from typing import Any

from aiohttp import hdrs, web

from tandem.broker.protocol import wire
from tandem.broker.queue.records import Batch
from tandem.broker.server.bodies import Answer, wants

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


def told(request: web.Request, value: Any) -> web.Response:
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


def lease(batch: Batch) -> dict[str, Any]:
    """What is told beside the groups of a leased batch: an id and a version for each, in their order."""
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
        Answer: 400, it is empty or too long.
    """
    found = request.headers.get("Idempotency-Key")
    if found is not None and not re.fullmatch(r"[!-~]{1,200}", found):
        raise Answer(400, "an Idempotency-Key has 1 to 200 visible ASCII characters")
    return found


def number(request: web.Request, name: str, kind: type[int] | type[float]) -> Any:
    """A number of the query; None if it is not there.

    Raises:
        Answer: 422, it is none, or negative.
    """
    text = request.query.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 2**53:
        raise Answer(422, f"{name} takes a number >= 0, not {text[:40]!r}")
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
