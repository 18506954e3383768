"""Reads request bodies within bounds: of one body, of what gzip makes of it, and of all bodies together."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from tandem_broker.protocol.wire import Malformed

T = TypeVar("T")

INLINE_BYTES = 1 << 20
"""Bodies up to this are decoded on the event loop, larger ones and gzip in a thread, one at a time."""
MESSAGE_BYTES = 1 << 16
"""Most bytes of a body that is no group."""


class RequestRejected(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: int, text: str, *, plain: bool = False, retry_after: float | None = None) -> None:
        """``text`` is the reason, as JSON ``{"detail": text}`` unless it is ``plain``."""
        super().__init__(text)
        self.status = status
        self.text = text
        self.plain = plain
        self.retry_after = retry_after

    def response(self) -> web.Response:
        """Make the answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.plain:
            return web.Response(status=self.status, text=self.text, headers=headers)
        body = json.dumps({"detail": self.text}).encode()
        return web.Response(status=self.status, body=body, content_type="application/json", headers=headers)


@dataclass(slots=True, kw_only=True)
class Bodies:
    """Reads the bodies of requests, within bounds."""

    body_bytes: int = 64 << 20
    """Most bytes of one body, as sent and as inflated."""
    inflation: int = 200
    """Most bytes that gzip may make of one byte, beyond 1 MiB. Real groups stay below 50."""
    pending_bytes: int = 512 << 20
    """Most bytes of all bodies being read, as sent; beyond it clients are asked to come back. One that does not say
    how long it is counts as the longest, and one is inflated at a time."""
    seconds: float = 120.0
    """How long one body may take."""
    pending: int = 0
    """Bytes of bodies being read or decoded, as sent."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tandem-bodies"))

    async def read(self, request: web.Request, parse: Callable[[bytes], T], *, most: int | None = None) -> T:
        """Read a request's message.

        Args:
            request: with a body.
            parse: makes the message from JSON.
            most: bytes of the body; None: as many as of any.

        Raises:
            Malformed: it is no such message.
            RequestRejected: it is too large, too slow or badly encoded.
        """
        coding = request.headers.get("Content-Encoding", "").strip().lower()
        if coding not in ("", "identity", "gzip", "x-gzip"):
            raise RequestRejected(400, f"Content-Encoding {coding[:40]} is not understood; send gzip, or plain bytes")
        size, most = request.content_length, min(most or self.body_bytes, self.body_bytes)
        if size is not None and size > most:
            raise _too_large(size, most)
        with self._reserved(most if size is None else size):
            if not (body := await self._collected(request, most)):
                raise Malformed("missing", (), "Field required")
            kind = request.content_type if "Content-Type" in request.headers else "(none)"
            if not kind.endswith(("/json", "+json")):  # any web page could send it
                why = f"Content-Type {kind[:80]} is not read; send application/json"
                raise Malformed("model_attributes_type", (), why)
            if coding.endswith("gzip"):
                return await self._threaded(lambda: parse(self._inflated(body, most)))
            return parse(body) if len(body) <= INLINE_BYTES else await self._threaded(lambda: parse(body))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def _threaded(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _collected(self, request: web.Request, most: int) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self.seconds):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > most:
                        raise _too_large(len(body), most)
        except TimeoutError:
            raise RequestRejected(408, f"the body did not come within {self.seconds:g} s") from None
        return bytes(body)

    @contextmanager
    def _reserved(self, size: int) -> Iterator[None]:
        """Count a body among those being read."""
        if self.pending + size > self.pending_bytes:
            raise RequestRejected(503, "too many bodies are being read; try again", retry_after=1)
        self.pending += size
        try:
            yield
        finally:
            self.pending -= size

    def _inflated(self, body: bytes, most: int) -> bytes:
        """Inflate gzip, never beyond the bounds."""
        most = min(most, max(INLINE_BYTES, len(body) * self.inflation))
        stream, inflated = zlib.decompressobj(31), b""
        with suppress(zlib.error):
            inflated = stream.decompress(body, most + 1)
        if len(inflated) > most:
            raise RequestRejected(413, f"the body inflates to more than {most} bytes")
        if not stream.eof or stream.unused_data.strip(b"\0"):
            raise RequestRejected(400, "Invalid gzip payload", plain=True)  # in the words that Atropos' clients know
        return inflated


def _too_large(size: int, most: int) -> RequestRejected:
    return RequestRejected(413, f"a body of {size} bytes; at most {most} are taken")
