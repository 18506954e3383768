"""HTTP client of brokers, engines and judges: failures by whether the request may have arrived, and retries."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from tandem.errors import BrokerError, ConfigError, redacted
from tandem.observability import waits

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""How long opening a connection may take."""
IDLE_SECONDS = 2.0
"""How long an idle connection is kept: less than servers keep it, so that none is used just as it is closed."""
MOST_BYTES = 256 << 20
"""Largest response, once inflated: a megabyte of gzip can hold a gigabyte."""
REPEAT_SECONDS = 30.0
"""Between two log lines about one and the same trouble."""


class HttpError(BrokerError):
    """A request that failed; ``reason`` leaves out the server and the path."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


class ServerAway(HttpError):
    """No connection came about: the request did not arrive."""


class ResponseLost(HttpError):
    """The connection broke after the request was sent: whether it was carried out is not known."""


class HttpStatusError(HttpError):
    """The server answered with an error status."""

    def __init__(self, message: str, reason: str, status: int, retry_after: float | None = None):
        super().__init__(message, reason)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An answer that is no error."""

    body: bytes
    """As it came."""
    headers: Mapping[str, str]
    """By name, in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter, so that many clients do not return in step, and an end to it."""

    first_seconds: float = 0.5
    """Upper bound of the first pause; each bound is twice the one before."""
    max_seconds: float = 15.0
    """Largest bound."""
    give_up_seconds: float = 1800.0
    """How long a server may be away before a request fails."""
    draw: Callable[[], float] = random.random
    """A number from 0 to 1."""

    def seconds(self, attempt: int) -> float:
        """The pause after a failed attempt (counted from 0): at least half its bound."""
        bound = min(self.max_seconds, self.first_seconds * 2.0 ** min(attempt, 32))
        return bound * (0.5 + self.draw() / 2)

    async def pause(self, attempt: int, at_least: float = 0.0) -> None:
        """Wait before the next attempt, ``at_least`` so many seconds."""
        await asyncio.sleep(max(at_least, self.seconds(attempt)))


class OutageLog:
    """Log lines about one outage of a server: when it begins, now and then while it lasts, and when it is over."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._since: float | None = None
        self._logged = 0.0

    @property
    def ongoing(self) -> bool:
        """True from ``report`` to ``end``."""
        return self._since is not None

    def report(self, error: str) -> float:
        """The server failed; returns the seconds since it first did."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._logged = now, now - REPEAT_SECONDS
        if now - self._logged >= REPEAT_SECONDS:
            self._logged = now
            log.warning("%s; trying again", error)
        return now - self._since

    def end(self) -> None:
        """The server answered."""
        if self._since is not None:
            log.warning("%s answers again after %.0f s", self._server, time.monotonic() - self._since)
            self._since = None


class HttpClient:
    """Requests to one server; connections are shared by concurrent calls."""

    def __init__(self, url: str, key: str = "", *, kind: str, most_bytes: int = MOST_BYTES):
        """``kind`` (such as broker) and the URL name the server in messages; an empty ``key`` sends none.

        What a file of a secret adds around a key, such as a new line, is no part of it.
        """
        self.url = url.rstrip("/")
        self.name = redacted(f"{kind} {self.url}")
        self._key = key.strip()
        self._most_bytes = most_bytes
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close connections; calls under way fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], seconds: float
    ) -> HttpResponse:
        """Send a request once.

        Raises:
            ServerAway: the request did not arrive.
            ResponseLost: it may have arrived.
            HttpStatusError: the answer has a status of 400 or more.
            HttpError: the answer is larger than ``most_bytes``.
            ConfigError: the URL is none.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with (
                # No deadline of its own: the timeout says more, and a run may have less patience than that.
                waits.waiting(waits.actor("client"), f"{method} {path}", on=self.name),
                self._opened().request(
                    method, self.url + path, data=body, headers=dict(headers), timeout=timeout
                ) as response,
            ):
                content = await read_bounded(response, self._most_bytes)
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{self.name} has no valid address; give one such as http://127.0.0.1:8000") from error
        except TooLong as error:
            raise HttpError(f"{self.name} answers {path} with {error}", str(error)) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerAway(f"{self.name} does not answer: {_reason(error)}", _reason(error)) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            reason = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else _reason(error)
            raise ResponseLost(f"{self.name} broke off {path}: {reason}", reason) from error
        if response.status >= 400:
            reason = " ".join(content.decode(errors="replace")[:500].split()) or response.reason or "no reason given"
            raise HttpStatusError(
                f"{self.name} answers {path} with {response.status}: {reason}",
                reason,
                response.status,
                _seconds(response.headers.get("Retry-After")),
            )
        return HttpResponse(body=content, headers=response.headers)

    def _opened(self) -> aiohttp.ClientSession:
        """The session; made where the event loop runs."""
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, middlewares=(_once,))
        return self._session


class TooLong(Exception):
    """A response larger than it may be."""


async def read_bounded(response: aiohttp.ClientResponse, most_bytes: int = MOST_BYTES) -> bytes:
    """Body of a response.

    Raises:
        TooLong: it has more bytes, once inflated; the connection is closed.
    """
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            response.close()
            raise TooLong(f"more than the {most_bytes >> 20} MiB that a response may have")
    return b"".join(pieces)


async def _once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send once: of itself aiohttp sends a GET again whose connection broke, and a batch may have gone with it."""
    try:
        return await send(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    return redacted(str(error)) or type(error).__name__


def _seconds(text: str | None) -> float | None:
    """Value of a Retry-After header; None if it is a date or missing."""
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
