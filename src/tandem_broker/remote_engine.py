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
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from tandem.engines.base import Engine, Health
from tandem.engines.vllm import protocol as wire
from tandem.engines.vllm.client.http import EngineStopped, EngineUnreachable
from tandem.engines.vllm.client.urls import MODELS, Models, UrlServer
from tandem.errors import ConfigError, Deadline, EngineError
from tandem.http import OutageLog, RetryPolicy
from tandem.observability import waits
from tandem.types import UNKNOWN_VERSION, Completion, PolicyVersion, Sampling

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
        info = await self._fetch("/bridge/info", wire.EngineInfo)
        if info is not None:
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
            choice = await self.generated(request, model, None)
            versions = (UNKNOWN_VERSION,) * len(choice.token_ids)
            return self.completion(choice.token_ids, choice.logprobs["token_logprobs"], versions, choice.finish_reason)
        reply = await self.post("/generate", request, seconds=self.request_seconds)
        try:
            # The first entry of each position's mapping is the sampled token.
            firsts = [next(iter(position[0].items())) for position in reply["logprobs"][0]]
            tokens, logprobs = [int(token) for token, _ in firsts], [logprob for _, logprob in firsts]
            versions = (UNKNOWN_VERSION,) * len(tokens)
            if "versions" in reply:  # before its first publish an engine holds the model as loaded, which is version 0
                versions = tuple(max(0, step) for step in wire.steps(reply["versions"][0]))
            return self.completion(tokens, logprobs, versions, reply["finish_reasons"][0])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self.odd("/generate", f"{error!r}; it must answer with token ids and logprobs") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEngines:
    """Addresses of the engines, and the model they serve."""

    urls: tuple[str, ...]
    """Where they are; a trailing /v1 is left out."""
    model: str
    """What they call the model."""
    key: str = field(default="", repr=False)
    """API key; empty: none is sent."""
    request_seconds: float = 3600.0
    """How long one answer may take."""
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(max_seconds=5.0))
    """Pauses between attempts, and how long all of them may be away."""

    @asynccontextmanager
    async def open(self, *, context: int, ends: Sequence[int]) -> AsyncIterator[RemoteEngine]:
        """Find out what they are.

        Args:
            context: most tokens of a prompt and its completion; an engine's own limit may lower it.
            ends: token ids that end an answer.

        Raises:
            EngineError: one stays away, or cannot be sampled from.
            ConfigError: one serves another model.
        """
        servers = [RemoteServer(native(url), self.key.strip(), self.request_seconds) for url in self.urls]
        try:
            await asyncio.gather(*map(self._identify, servers))
            limits = [server.context for server in servers if server.context is not None]
            yield RemoteEngine(self, servers, context=min([context, *limits]), ends=ends)
        finally:
            await asyncio.gather(*(server.close() for server in servers))

    async def _identify(self, server: RemoteServer) -> None:
        attempt = 0
        while True:
            try:
                await server.identify(self.model)
            except (EngineUnreachable, EngineStopped, Deadline) as error:
                if self.away(server, error) > self.retry.give_up_seconds:
                    raise
                await self.retry.pause(attempt)
                attempt += 1
            else:
                server.outage.end()
                return

    def away(self, server: RemoteServer, error: Exception) -> float:
        """Report that a server is away; returns the seconds since it went."""
        return server.outage.report(f"{error}; is it running? (tandem serve engine RECIPE)")


class RemoteEngine(Engine):
    """One policy on servers of others. What a trainer alone may do is refused."""

    def __init__(self, spec: RemoteEngines, servers: Sequence[RemoteServer], *, context: int, ends: Sequence[int]):
        self._spec = spec
        self._servers = servers
        self._context = context
        self._ends = tuple(ends)
        self._newest = 0

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
                completion = await server.sampled(request, self._spec.model)
            except (EngineUnreachable, EngineStopped) as error:
                self._put_aside(server, error)
            except EngineError:
                failures += 1
                if failures == TRIES:
                    raise
                await self._spec.retry.pause(failures)
            else:
                server.outage.end()
                server.failed_attempts = 0
                self._newest = max(self._newest, completion.version_max)
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
        retry, away = self._spec.retry, self._spec.away(server, error)
        if away > retry.give_up_seconds and all(other.outage.ongoing for other in self._servers):
            limit = retry.give_up_seconds
            raise EngineError(f"{error}; is it running? It was waited for {limit:g} s (give_up_seconds)") from error
        server.away_until = time.monotonic() + retry.seconds(server.failed_attempts)
        server.failed_attempts += 1

    def version(self) -> PolicyVersion:
        """The newest version that sampled something here."""
        return PolicyVersion(step=self._newest, digest="")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        raise _trainers_alone("score")

    async def set_version(self, version: PolicyVersion) -> None:
        raise _trainers_alone("stamp")

    async def pause(self, *, finish: bool = False, step: int | None = None) -> None:
        raise _trainers_alone("pause")

    async def resume(self) -> float:
        raise _trainers_alone("resume")

    async def health(self) -> Health:
        away = [server.name for server in self._servers if server.outage.ongoing]
        running = sum(server.outstanding for server in self._servers)
        return Health(ok=len(away) < len(self._servers), running=running, waiting=0, detail=", ".join(away))

    async def close(self) -> None:
        """Nothing to end: the servers were started elsewhere."""


def native(url: str) -> str:
    """A server's root, of which /v1 is one branch."""
    return url.rstrip("/").removesuffix("/v1")


def _trainers_alone(what: str) -> EngineError:
    return EngineError(f"an engine that runs elsewhere is its trainer's to {what}")
