"""Remote engines, sampled over HTTP by a process that publishes no weights to them.

An engine that does not respond is skipped for a while and its requests go to the others. While none responds, all
requests wait: a restart, a publish or a broken network costs time and no rollout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tandem.engines.base import Engine, Health
from tandem.engines.vllm import protocol as wire
from tandem.errors import ConfigError, EngineError
from tandem.http import HttpError, HttpStatusError, ResponseLost, RetryPolicy, ServerAway
from tandem.observability import waits
from tandem.types import UNKNOWN_VERSION, Completion, Finish, Json, PolicyVersion, Sampling
from tandem_broker.client import Connection, RequestRefused

log = logging.getLogger(f"tandem.{__name__}")

TRIES = 3
"""Attempts at a request that an engine fails with an internal error (500)."""
JSON = {"Content-Type": "application/json"}


_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """HTTP dialect of one kind of engine."""

    kind: Literal["tandem", "atropos", "openai"]
    """tandem: started by ``tandem serve engine`` or by a trainer; atropos: Atropos' example server, whose answers
    carry no policy step; openai: stock vLLM, whose /v1/completions takes and gives token ids."""
    model: str = ""
    """What the server calls the model."""

    @property
    def path(self) -> str:
        """Route that samples."""
        return "/v1/completions" if self.kind == "openai" else "/generate"

    def request(self, prompt: Sequence[int], sampling: Sampling, limit: int, ends: Sequence[int]) -> bytes:
        """The body that asks for one completion of at most ``limit`` tokens."""
        fields = _sampling_fields(sampling, limit, ends)
        if self.kind == "tandem":
            return msgspec.json.encode(wire.completion_request(prompt, sampling, limit=limit, ends=ends))
        if self.kind == "atropos":  # what such a server does not know, it answers with an error
            return msgspec.json.encode({"prompt": {"prompt_token_ids": list(prompt)}, "logprobs": 0, **fields})
        # Here what is off is said: where nothing is, vLLM takes what the model's own generation_config.json recommends.
        # And token ids are asked for in both ways that vLLM's releases know.
        ids = {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return msgspec.json.encode({**_OFF, **fields, **ids, "model": self.model, "prompt": list(prompt)})

    def completion(self, body: bytes, name: str) -> Completion:
        """What the answer of the engine of that name says.

        Raises:
            EngineError: it lacks token ids or logprobs.
        """
        try:
            reply = msgspec.json.decode(body)
            return _chosen(reply["choices"][0]) if self.kind == "openai" else _generated(reply)
        except EngineError as error:
            raise EngineError(f"{name}: {error}") from error
        except (msgspec.DecodeError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{name}: {self.path} answers without token ids or logprobs ({error!r}), and text cannot be trained "
                "on; use vLLM, or an engine started by: tandem serve engine RECIPE"
            ) from error


def _generated(reply: Any) -> Completion:
    """The first entry of each position's mapping is the sampled token; Tandem's engines tell policy steps too."""
    firsts = [_first(place) for place in reply["logprobs"][0]]
    # Before its first publish an engine holds the model as loaded, which is version 0.
    versions = [max(0, step) for step in wire.steps(reply["versions"][0])] if "versions" in reply else ()
    tokens, logprobs = [token for token, _ in firsts], [logprob for _, logprob in firsts]
    return _completion(tokens, logprobs, reply["finish_reasons"][0], versions)


def _chosen(choice: Any) -> Completion:
    """Token ids stand beside a choice, or in the texts of its tokens."""
    chosen = choice["logprobs"] or {}
    tokens = choice.get("token_ids") or [int(text.removeprefix("token_id:")) for text in chosen["tokens"]]
    return _completion(tokens, chosen["token_logprobs"], choice["finish_reason"])


@dataclass(slots=True, kw_only=True)
class _EngineServer:
    connection: Connection
    dialect: Dialect
    context: int | None = None
    failed_attempts: int = 0
    outstanding: int = 0
    away_until: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEngines:
    """Addresses of the engines, and their dialect."""

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

    @property
    def waited(self) -> str:
        """The end of an error, once patience is at its end."""
        return f"it was waited for {self.retry.give_up_seconds:g} s (give_up_seconds)"

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
        connections = [Connection(native(url), self.key, kind="engine", retry=self.retry) for url in self.urls]
        try:
            servers = await asyncio.gather(*map(self._identify, connections))
            limits = [server.context for server in servers if server.context is not None]
            yield RemoteEngine(self, servers, context=min([context, *limits]), ends=ends)
        finally:
            await asyncio.gather(*(connection.close() for connection in connections))

    async def _identify(self, connection: Connection) -> _EngineServer:
        """How a server is spoken to, and its context where it tells."""
        try:
            models, context = await _models(connection)
            info = await _probe(connection, "GET", "/bridge/info")
            probe = {"prompt": {"prompt_token_ids": [0]}, "max_tokens": 1, "logprobs": 0, "temperature": 1.0}
            info_of_tandem = info if isinstance(info, dict) and {"engine", "context", "logprobs"} <= set(info) else None
            generates = info_of_tandem or await _probe(connection, "POST", "/generate", probe) is not None
        except RequestRefused as error:
            raise EngineError(str(error)) from error
        except HttpError as error:
            raise EngineError(f"{error}; {self.waited}") from error
        if models and self.model not in models and not (info_of_tandem and info_of_tandem["model"] == self.model):
            raise ConfigError(
                f"{connection.name} serves {', '.join(models)}, not {self.model}; if it is the same model under "
                f"another name, say engine.model={models[0]}; otherwise change model or the engine's url"
            )
        if info_of_tandem and info_of_tandem["logprobs"] != "processed_logprobs":
            raise EngineError(
                f"{connection.name} gives {info_of_tandem['logprobs']}, which leave the temperature out; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if not generates and not models:
            raise EngineError(f"{connection.name} has neither /generate nor /v1/models; look at the url")
        dialect = Dialect("tandem" if info_of_tandem else "atropos" if generates else "openai", self.model)
        return _EngineServer(
            connection=connection,
            dialect=dialect,
            context=int(info_of_tandem["context"]) if info_of_tandem else context,
        )


async def _models(connection: Connection) -> tuple[list[str], int | None]:
    """What /v1/models lists, and the smallest context in it; nothing of a server without it."""
    reply = await _probe(connection, "GET", "/v1/models")
    listed = reply.get("data") if isinstance(reply, dict) else None
    entries = [entry for entry in listed or () if isinstance(entry, dict) and "id" in entry]
    limits = [entry["max_model_len"] for entry in entries if isinstance(entry.get("max_model_len"), int)]
    return [str(entry["id"]) for entry in entries], min(limits, default=None)


async def _probe(connection: Connection, method: str, path: str, body: Json = None) -> Any:
    """An answer's JSON; None where the server has no such route."""
    try:
        return msgspec.json.decode((await connection.ask(method, path, body)).body)
    except msgspec.DecodeError:
        return None
    except RequestRefused as error:
        if error.status in (404, 405):
            return None
        raise


class RemoteEngine(Engine):
    """One policy on servers of others. What a trainer alone may do is refused."""

    def __init__(self, spec: RemoteEngines, servers: Sequence[_EngineServer], *, context: int, ends: Sequence[int]):
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
        return all(server.dialect.kind == "tandem" for server in self._servers)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        room = self._context - len(prompt)
        if not prompt or room < 1:
            raise EngineError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._context}")
        limit, failures = min(sampling.max_tokens, room), 0
        while True:
            server = await self._next()
            body = server.dialect.request(prompt, sampling, limit, self._ends)
            server.outstanding += 1
            try:
                seconds = self._spec.request_seconds
                answer = await server.connection.http.call("POST", server.dialect.path, body, JSON, seconds)
            except (ServerAway, ResponseLost) as error:
                self._put_aside(server, f"{error}; is it running?")
            except HttpStatusError as error:
                # An engine whose scheduler has died says so for some seconds, and is then restarted.
                failures += error.status == 500 and "EngineDeadError" not in str(error)
                if (error.status < 500 and error.status != 429) or failures == TRIES:
                    raise EngineError(server.connection.advice(error)) from error
                self._put_aside(server, str(error), error.retry_after or 0.0)
            else:
                server.connection.outage.end()
                server.failed_attempts = 0
                completion = server.dialect.completion(answer.body, server.connection.name)
                self._newest = max(self._newest, completion.version_max)
                return completion
            finally:
                server.outstanding -= 1

    async def _next(self) -> _EngineServer:
        """The server with the fewest requests of those that answer; waits while none does."""
        while True:
            now = time.monotonic()
            awake = [server for server in self._servers if server.away_until <= now]
            if awake:
                return min(awake, key=lambda server: server.outstanding)
            names = ", ".join(server.connection.name for server in self._servers)
            async with waits.waiting(waits.actor("rollouts"), "to be asked again", on=names):
                await asyncio.sleep(min(server.away_until for server in self._servers) - now)

    def _put_aside(self, server: _EngineServer, what: str, at_least: float = 0.0) -> None:
        """Leave a server alone for a while.

        Raises:
            EngineError: patience is at its end.
        """
        away = server.connection.outage.report(what)
        if away > self._spec.retry.give_up_seconds and all(other.connection.outage.ongoing for other in self._servers):
            raise EngineError(f"{what}; {self._spec.waited}")
        server.away_until = time.monotonic() + max(at_least, self._spec.retry.seconds(server.failed_attempts))
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
        away = [server.connection.name for server in self._servers if server.connection.outage.ongoing]
        running = sum(server.outstanding for server in self._servers)
        return Health(ok=len(away) < len(self._servers), running=running, waiting=0, detail=", ".join(away))

    async def close(self) -> None:
        """Nothing to end: the servers were started elsewhere."""


def native(url: str) -> str:
    """A server's root, of which /v1 is one branch."""
    return url.rstrip("/").removesuffix("/v1")


def _trainers_alone(what: str) -> EngineError:
    return EngineError(f"an engine that runs elsewhere is its trainer's to {what}")


_OFF: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""What leaves sampling as it is."""


def _sampling_fields(sampling: Sampling, limit: int, ends: Sequence[int]) -> Mapping[str, Json]:
    """Sampling under vLLM's names, without what is off."""
    ends = [*ends, *sampling.stop_token_ids]
    stop = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
    values = {name: getattr(sampling, name) for name in _OFF}
    values["min_tokens"] = min(sampling.min_tokens, limit)
    return {
        "n": 1,
        "max_tokens": limit,
        "temperature": sampling.temperature,
        **{name: value for name, value in values.items() if value != _OFF[name]},
        **({"stop_token_ids": list(ends)} if ends else {}),
        **stop,
    }


def _first(place: Any) -> tuple[int, float]:
    mapping = place[0] if isinstance(place, list) else place
    ((token, logprob),) = list(mapping.items())[:1]
    return int(token), float(logprob)


def _completion(
    tokens: Sequence[int], logprobs: Sequence[float | None], finish: str | None, versions: Sequence[int] = ()
) -> Completion:
    if not tokens:
        raise EngineError("the engine sampled not a single token")
    if len(logprobs) != len(tokens) or not all(p is not None and math.isfinite(p) for p in logprobs):
        raise EngineError(
            f"the engine gave {len(logprobs)} logprobs, not all of them numbers, for {len(tokens)} tokens"
        )
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(p for p in logprobs if p is not None),
        versions=tuple(versions) or (UNKNOWN_VERSION,) * len(tokens),
        finish=_FINISH.get(finish or "", "abort"),
    )
