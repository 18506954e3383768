"""Remote engines, sampled over HTTP by a process that publishes no weights to them.

An engine that does not respond is skipped for a while and its requests go to the others. While none responds, all
requests wait: a restart, a publish or a broken network costs time and no rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Literal, TypeVar

import msgspec

from tandem.engines.base import Health, Sampler
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client.http import EngineStopped, EngineUnreachable
from tandem.engines.vllm.client.urls import MODELS, Models, UrlServer
from tandem.errors import ConfigError, Deadline, EngineError
from tandem.http import OutageLog, RetryPolicy
from tandem.observability import waits
from tandem.types import UNKNOWN_VERSION, Completion, Sampling

T = TypeVar("T")

TRIES = 3
"""Attempts at a request that an engine which answers fails at."""
PROBE = wire.Generate(prompt=wire.Ids(prompt_token_ids=[0]), max_tokens=1, logprobs=0)
"""Asks whether there is a /generate."""
IDENTIFY_SECONDS = 60.0
"""How long an answer to what an engine is may take."""
AWAY = frozenset({429, 502, 503, 504})
"""Statuses of an engine, or of what stands before it, that is to be asked again later."""


class RemoteServer(UrlServer):
    """Client of an engine that another process publishes to."""

    kind: Literal["tandem", "atropos", "openai"] = "openai"
    """tandem: started by ``tandem serve engine`` or by a trainer; atropos: Atropos' example server, whose answers
    carry no policy step; openai: stock vLLM, whose /v1/completions takes and gives token ids."""
    context: int | None = None
    failed_attempts = 0
    away_until = 0.0

    def __init__(self, url: str, key: str, request_seconds: float):
        super().__init__(url, key, control_seconds=IDENTIFY_SECONDS, request_seconds=request_seconds)
        self.outage = OutageLog(self.name)

    async def identify(self, model: str) -> None:
        """Find out how it is spoken to.

        Raises:
            EngineError: it is no engine, or leaves the temperature out of its logprobs.
            ConfigError: it serves another model.
        """
        models = await self._fetch(MODELS, Models)
        entries = [] if models is None else models.data
        self.context = min((entry.max_model_len for entry in entries if entry.max_model_len), default=None)
        served = [entry.id for entry in entries]
        if (info := await self._fetch("/bridge/info", wire.EngineInfo)) is not None:
            self.kind, self.context = "tandem", info.context
            served.append(info.model)
            if info.logprobs != "processed_logprobs":
                raise EngineError(
                    f"{self.name} gives {info.logprobs}, which leave the temperature out; start it with "
                    "--logprobs-mode processed_logprobs"
                )
        elif (await self.ask("POST", "/generate", PROBE))[0] < 400:
            self.kind = "atropos"
        elif not served:
            raise EngineError(f"{self.name} has neither /generate nor {MODELS}; look at the url")
        if served and model not in served:
            raise ConfigError(
                f"{self.name} serves {', '.join(served)}, not {model}; if it is the same model under another name, say "
                f"engine.model={served[0]}; otherwise change model or the engine's url"
            )

    async def _fetch(self, path: str, kind: type[T]) -> T | None:
        """What it answers; None where it has no such route, or another by that name."""
        status, content = await self.ask("GET", path)
        if status in (404, 405):
            return None
        self._refused(path, status, content)
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(content, type=kind)
        return None

    def refusal(self, path: str, status: int, title: str, detail: str) -> EngineError:
        error = super().refusal(path, status, title, detail)
        return EngineUnreachable(str(error)) if status in AWAY else error

    async def sampled(self, request: wire.Generate, model: str) -> Completion:
        """One completion.

        Raises:
            EngineUnreachable, EngineStopped: it is to be asked again later.
            EngineError: it refuses, or its answer lacks token ids or logprobs.
        """
        if self.kind == "openai":
            return self.completion(await self.generated(request, model, None, UNKNOWN_VERSION))
        reply = await self.post("/generate", request, seconds=self.request_seconds)
        try:
            # The first entry of each position's mapping is the sampled token.
            firsts = [next(iter(position[0].items())) for position in reply["logprobs"][0]]
            tokens, logprobs = tuple(int(token) for token, _ in firsts), tuple(logprob for _, logprob in firsts)
            versions = [(UNKNOWN_VERSION, len(tokens))]
            if "versions" in reply:  # before its first publish an engine holds the model as loaded, which is version 0
                versions = [(max(0, step), num_tokens) for step, num_tokens in reply["versions"][0]]
            finish = reply["finish_reasons"][0]
            return self.completion(wire.Sampled(0, tokens, logprobs, versions, finish, self.instance_id))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self.odd("/generate", f"{error!r}; it must answer with token ids and logprobs") from error


class RemoteEngine(Sampler):
    """One policy on servers of others."""

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        context: int,
        ends: Sequence[int],
        key: str = "",
        request_seconds: float = 3600.0,
        retry: RetryPolicy,
    ) -> None:
        """Nothing is opened yet.

        Args:
            urls: where they are; a trailing /v1 is left out.
            model: what they call the model.
            context: most tokens of a prompt and its completion; an engine's own limit may lower it.
            ends: token ids that end an answer.
            key: API key; empty: none is sent.
            request_seconds: how long one answer may take.
            retry: pauses between attempts, and how long all of them may be away.
        """
        self._servers = [RemoteServer(native(url), key.strip(), request_seconds) for url in urls]
        self._model = model
        self._context = context
        self._ends = tuple(ends)
        self._retry = retry

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Find out what they are.

        Raises:
            EngineError: one stays away, or cannot be sampled from.
            ConfigError: one serves another model.
        """
        try:
            await asyncio.gather(*map(self._identify, self._servers))
            yield
        finally:
            await asyncio.gather(*(server.close() for server in self._servers))

    async def _identify(self, server: RemoteServer) -> None:
        for attempt in count():
            try:
                await server.identify(self._model)
            except (EngineUnreachable, EngineStopped, Deadline) as error:
                if _away(server, error) > self._retry.give_up_seconds:
                    raise
                await self._retry.pause(attempt)
            else:
                server.outage.end()
                self.limit(server.context or self._context)
                return

    @property
    def context(self) -> int:
        return self._context

    def limit(self, context: int) -> None:
        """Sample no longer sequences than this."""
        self._context = min(self._context, context)

    @property
    def tells_versions(self) -> bool:
        """True if tokens bear the policy step that sampled them."""
        return all(server.kind == "tandem" for server in self._servers)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        request = wire.completion_request(prompt, sampling, limit=self.room(prompt), ends=self._ends)
        failures = 0
        while True:
            server = await self._next()
            server.outstanding += 1
            try:
                completion = await server.sampled(request, self._model)
            except (EngineUnreachable, EngineStopped) as error:
                self._put_aside(server, error)
            except EngineError:
                failures += 1
                if failures == TRIES:
                    raise
                await self._retry.pause(failures)
            else:
                server.outage.end()
                server.failed_attempts = 0
                return completion
            finally:
                server.outstanding -= 1

    async def _next(self) -> RemoteServer:
        """The server with the fewest requests of those that answer; waits while none does."""
        while True:
            now = time.monotonic()
            awake = [server for server in self._servers if server.away_until <= now]
            if awake:
                return min(awake, key=lambda server: server.outstanding)
            names = ", ".join(server.name for server in self._servers)
            async with waits.waiting(waits.actor("rollouts"), "to be asked again", on=names):
                await asyncio.sleep(min(server.away_until for server in self._servers) - now)

    def _put_aside(self, server: RemoteServer, error: EngineError) -> None:
        """Leave a server alone for a while; raises where all have been away for too long."""
        retry, away = self._retry, _away(server, error)
        if away > retry.give_up_seconds and all(other.outage.ongoing for other in self._servers):
            limit = retry.give_up_seconds
            raise EngineError(f"{error}; is it running? It was waited for {limit:g} s (give_up_seconds)") from error
        server.away_until = time.monotonic() + retry.seconds(server.failed_attempts)
        server.failed_attempts += 1

    async def health(self) -> Health:
        away = [server.name for server in self._servers if server.outage.ongoing]
        running = sum(server.outstanding for server in self._servers)
        return Health(ok=len(away) < len(self._servers), running=running, waiting=0, detail=", ".join(away))


def native(url: str) -> str:
    """A server's root, of which /v1 is one branch."""
    return url.rstrip("/").removesuffix("/v1")


def _away(server: RemoteServer, error: Exception) -> float:
    """Report that a server is away; returns the seconds since it went."""
    return server.outage.report(f"{error}; is it running? (tandem serve engine RECIPE)")
