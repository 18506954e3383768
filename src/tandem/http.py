"""HTTP to a broker: failures told apart by whether the request may have arrived, and waits that grow."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from tandem.errors import BrokerError
from tandem.observability import waits

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""How long opening a connection may take."""
IDLE_SECONDS = 2.0
"""How long an idle connection is kept: less than servers keep it, so that none is used just as it is closed."""
REPEAT_SECONDS = 30.0
"""Between two log lines about one and the same trouble."""


class Unreachable(BrokerError):
    """No connection came about: the request did not arrive."""


class AnswerLost(BrokerError):
    """The connection broke after the request was sent: whether it was carried out is not known."""


class _Broken(aiohttp.ClientError):
    """As aiohttp says it, but nothing that aiohttp mends."""


class Answered(BrokerError):
    """The broker answered with an error."""

    def __init__(self, message: str, status: int, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that is no error."""

    body: bytes
    """As it came."""
    headers: Mapping[str, str]
    """By name, in any case."""


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Waits that double up to a bound, of which a random part is waited: many clients do not return in step."""

    first: float = 0.5
    """Bound of the first wait, in seconds."""
    most: float = 15.0
    """Largest bound, in seconds."""
    draw: Callable[[], float] = random.random
    """A number from 0 to 1."""
    _times: int = 0

    def fresh(self) -> Backoff:
        """One that starts from the beginning."""
        return Backoff(first=self.first, most=self.most, draw=self.draw)

    def next(self) -> float:
        """Seconds of the next wait: longer than the last on average, and never less than half the bound."""
        bound = min(self.most, self.first * 2.0**self._times)
        self._times = min(self._times + 1, 32)
        return bound * (0.5 + self.draw() / 2)

    async def wait(self, at_least: float = 0.0) -> None:
        """Wait once more, ``at_least`` so many seconds."""
        await asyncio.sleep(max(at_least, self.next()))


class Trouble:
    """Tells of one trouble when it begins, now and then while it lasts, and when it is over."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._since: float | None = None
        self._told = 0.0

    @property
    def there(self) -> bool:
        """True while it lasts."""
        return self._since is not None

    def lasts(self, what: str) -> float:
        """It is there; returns the seconds since it began."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._told = now, now - REPEAT_SECONDS
        if now - self._told >= REPEAT_SECONDS:
            self._told = now
            log.warning("%s; trying again", what)
        return now - self._since

    def over(self) -> None:
        """It is gone, if it was there."""
        if self._since is not None:
            log.warning("%s answers again after %.0f s", self._who, time.monotonic() - self._since)
            self._since = None


class Http:
    """One server; connections are shared by concurrent calls."""

    def __init__(self, url: str, key: str, *, who: str):
        """``who`` names the server in messages; an empty ``key`` sends none."""
        self.url = url.rstrip("/")
        self.who = f"{who} {self.url}"
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close connections; calls under way fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], seconds: float
    ) -> Answer:
        """Ask once.

        Raises:
            Unreachable: the request did not arrive.
            AnswerLost: it may have arrived.
            Answered: with an error's status.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with (
                # No deadline of its own: the timeout says more, and a run may have less patience than that.
                waits.waiting(waits.actor("client"), f"{method} {path}", on=self.who),
                self._opened().request(
                    method, self.url + path, data=body, headers=dict(headers), timeout=timeout
                ) as response,
            ):
                found = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{self.who} does not answer: {_said(error)}") from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise AnswerLost(f"{self.who} broke off {path}: {_said(error)}") from error
        if response.status >= 400:
            reason = " ".join(found.decode(errors="replace")[:500].split()) or response.reason or "no reason given"
            raise Answered(
                f"{self.who} answers {path} with {response.status}: {reason}",
                response.status,
                _seconds(response.headers.get("Retry-After")),
            )
        return Answer(body=found, headers=response.headers)

    def _opened(self) -> aiohttp.ClientSession:
        """The session; made where the event loop runs."""
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, middlewares=(_once,))
        return self._session


async def _once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send once: of itself aiohttp sends a GET again whose connection broke, and a batch may have gone with it."""
    try:
        return await send(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _Broken(_said(error)) from error


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _seconds(text: str | None) -> float | None:
    """Value of a Retry-After header; None if it is a date or missing."""
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
