"""One engine over HTTP: every call has a deadline, every failure says which engine and what it last said."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from tandem.engines.base import EngineRequirements
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client.process import EngineProcess
from tandem.errors import EngineError, StaleWeights, redacted
from tandem.lazy import aiohttp
from tandem.observability import waits
from tandem.types import Completion, Finish

T = TypeVar("T")

AGAIN = 2
"""How often a call is repeated whose connection broke: the network's fault, unless nothing listens there any more."""
ONCE = ("/nccl/", "/lora/", "/v1/load_lora", "/init_weight", "/start_weight", "/update_weight", "/finish_weight")
"""How routes begin whose calls do something else the second time."""
GONE_SECONDS = 2.0
"""An engine that cannot be connected to for this long has gone."""
LOOK_SECONDS = 0.2
"""Between two looks whether a process of ours still runs."""


class EngineUnreachable(EngineError):
    """The engine does not answer: its process is gone, or the network is."""


class EngineCoreDied(EngineUnreachable):
    """The HTTP process answers that vLLM's engine core has died; that process will end too, in a few seconds."""


class EngineStopped(EngineError):
    """The weights that it samples from are in doubt: it gives out nothing until a publish succeeds."""


_REFUSALS: Mapping[str, type[EngineError]] = {"EngineDeadError": EngineCoreDied, "Stopped": EngineStopped}
"""Errors by the titles of problems."""


class EngineReplaced(EngineUnreachable, StaleWeights):
    """Another process answers than the one that weights were published to."""


class ApiKeyRefused(EngineError):
    """The engine refuses the API key."""


class EngineServer:
    """Client of one engine's HTTP process, with the child process if the trainer started it."""

    plain = False
    """It is a stock vLLM, without Tandem's routes."""

    def __init__(self, url: str, key: str, *, control_seconds: float, request_seconds: float):
        self.url = url.rstrip("/")
        self.process: EngineProcess | None = None
        self.reservation: socket.socket | None = None
        """Keeps the port for a process that is still to bind it, and for those started again after it."""
        self.instance_id = ""
        self.outstanding = 0
        self.key = key
        self._control = control_seconds
        self.request_seconds = request_seconds
        self._session: aiohttp.ClientSession | None = None
        self._attending: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """For messages."""
        return redacted(f"engine {self.url}") + (f" (pid {self.process.pid})" if self.process else "")

    def opened(self) -> aiohttp.ClientSession:
        """The session; made where the event loop runs."""
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
            connector = aiohttp.TCPConnector(limit=0)  # vLLM queues; a second queue here would only hide it
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
            if self.process is not None:
                self._attending = asyncio.create_task(self._attend(self._session), name=f"whether {self.name} runs")
        return self._session

    async def _attend(self, session: aiohttp.ClientSession) -> None:
        """Fail what was asked of our process when that has ended.

        Those that it had started may outlive it and hold its listening socket, where a call then waits for ever.
        """
        while not self._ended():
            await asyncio.sleep(LOOK_SECONDS)
        if self._session is session:
            self._session = None
        await session.close()

    def _ended(self) -> bool:
        return self.process is not None and not self.process.alive()

    async def close(self) -> None:
        """Close connections; requests in flight fail."""
        self._closed = True
        if self.reservation is not None:
            self.reservation.close()
        if self._attending is not None:
            self._attending.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self) -> wire.EngineInfo:
        """What it is and holds."""
        return await self.get("/bridge/info", wire.EngineInfo)

    def lacks(self, requirements: EngineRequirements) -> str:
        """Why it cannot be published to as a run requires; empty if it can."""
        return ""

    def leave(self) -> None:
        """It is not used any more, until it answers again."""

    def address(self) -> str:
        """This machine's address on the way to it, by which it reaches us too unless something in between translates.

        Raises:
            EngineUnreachable: there is no way there.
        """
        parts = urlsplit(self.url)
        try:
            family, kind, *_, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as way:
                way.connect(place)  # of a datagram's socket: nothing is sent
                return str(way.getsockname()[0])
        except OSError as error:
            raise EngineUnreachable(f"{self.name} cannot be connected to: {error}") from error

    async def get(self, path: str, kind: type[T]) -> T:
        """Ask; see ``post``."""
        answer: T = await self._call("GET", path, None, kind, self._control)
        return answer

    async def post(self, path: str, body: Any = None, kind: Callable[..., T] | Any = dict, seconds: float = 0.0) -> Any:
        """Tell.

        Args:
            path: the route.
            body: a struct of ``protocol`` or plain data.
            kind: type of the answer.
            seconds: deadline; by default that of control messages.

        Raises:
            EngineUnreachable: nothing answers, or the engine behind what answers has died.
            EngineError: it answers that something went wrong.
            Deadline: it answers too late.
        """
        return await self._call("POST", path, {} if body is None else body, kind, seconds or self._control)

    async def many(self, path: str, body: Callable[[], bytes], took: Callable[[bytes], None]) -> None:
        """Ask for what comes in pieces, each of which is taken as it comes; raises as ``post``, but for the deadline.

        Args:
            path: the route.
            body: what is asked, made anew where a connection breaks and another can be had.
            took: takes a piece.
        """
        status, content = await self._answer("POST", path, body, took)
        self._refused(path, status, content)

    async def _call(self, method: str, path: str, body: Any, kind: Any, seconds: float) -> Any:
        status, content = await self.ask(method, path, body, seconds)
        self._refused(path, status, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:  # a logprob that is no number, for one
            raise self.odd(path, error) from error

    async def ask(self, method: str, path: str, body: Any = None, seconds: float = 0.0) -> tuple[int, bytes]:
        """Status and body of an answer, whatever they are; see ``post``."""
        data, seconds = None if body is None else msgspec.json.encode(body), seconds or self._control
        async with waits.waiting(waits.actor("trainer"), f"{method} {path}", on=self.name, deadline=seconds):
            return await self._answer(method, path, lambda: data)

    def completion(self, sampled: wire.Sampled) -> Completion:
        """What it sampled, if every token has a logprob that is a finite number."""
        tokens, finish = sampled.tokens, sampled.finish
        logprobs: tuple[Any, ...] = sampled.logprobs  # of other servers some may be null
        if None in logprobs or not all(map(math.isfinite, logprobs)):
            bad = next(n for n, p in enumerate(logprobs) if p is None or not math.isfinite(p))
            raise self.odd(
                "/generate",
                f"the logprob of token {bad + 1} of {len(tokens)} (id {tokens[bad]}) is {logprobs[bad]}, no finite "
                f"number; the answer's finish is {finish}",
            )
        if len(logprobs) != len(tokens):
            raise EngineError(f"{self.name} told {len(logprobs)} logprobs of {len(tokens)} tokens")
        finishes: dict[str, Finish] = {"stop": "stop", "length": "length"}
        return Completion(
            tokens=tokens,
            logprobs=sampled.logprobs,
            versions=wire.steps(sampled.versions),
            finish=finishes.get(finish, "abort"),
            experts=sampled.experts,
        )

    def odd(self, path: str, error: object) -> EngineError:
        """The error of an answer that cannot be read."""
        return EngineError(f"{self.name} answers {path} with something else than was asked for: {error}")

    def _refused(self, path: str, status: int, content: bytes) -> None:
        if status in (401, 403):
            variable = "engine.api_key_variable names the environment variable that holds it"
            raise ApiKeyRefused(f"{self.name} answers {path} with {status}: {_detail(content)}; {variable}")
        if status >= 400:
            title = next((title for title in _REFUSALS if f'"{title}"'.encode() in content), "")
            raise self.refusal(path, status, title, _detail(content))

    def refusal(self, path: str, status: int, title: str, detail: str) -> EngineError:
        """The error of a request that was refused; ``title`` is that of the problem."""
        kind = _REFUSALS.get(title, EngineError)
        return kind(f"{self.name} answers {path} with {status}: {detail}{self._last_words()}")

    async def _answer(
        self, method: str, path: str, body: Callable[[], bytes | None], took: Callable[[bytes], None] | None = None
    ) -> tuple[int, bytes]:
        """Status and body, but for what is taken; asked again where a connection breaks and another can be had."""
        from tandem.http import TooLong, read_bounded  # loads aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        tries = 0
        while True:
            if self._ended():
                raise EngineUnreachable(f"{self.name} does not answer {path}{self._last_words()}")
            try:
                async with self.opened().request(method, self.url + path, data=body(), timeout=timeout) as response:
                    if took is None or response.status >= 400:
                        return response.status, await read_bounded(response)
                    async for piece in response.content.iter_any():
                        took(piece)
                    return response.status, b""
            except TooLong as error:
                raise EngineError(f"{self.name} answers {path} with {error}") from error
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                broke = not isinstance(error, (aiohttp.ClientConnectorError, TimeoutError))
                if broke and tries < AGAIN and not path.startswith(ONCE) and not self._closed:
                    tries += 1
                    continue
                reason = str(error) or type(error).__name__
                raise EngineUnreachable(f"{self.name} does not answer {path}: {reason}{self._last_words()}") from error

    def _last_words(self) -> str:
        """What its log says, if it is our child and dead."""
        if self.process is None or not self._ended():
            return ""
        return f"; it {self.process.exit_reason()}{self.process.log_summary()}"

    async def gone(self) -> bool:
        """True if the engine itself has ended, or is about to, rather than one connection."""
        late = time.monotonic() + GONE_SECONDS
        while not self._ended():
            try:
                await self.get("/health", dict)
            except EngineCoreDied:
                return True
            except EngineUnreachable:  # a dying process closes its sockets before it can be waited for
                if time.monotonic() > late:
                    return True
                await asyncio.sleep(0.1)
            except EngineError:
                return False  # it has its reasons, and says them
            else:
                return False
        return True


def _detail(body: bytes) -> str:
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")[:500]
    if isinstance(content, dict):
        return str(content.get("detail") or content.get("error") or content)
    return str(content)[:500]
