"""An OpenAI-compatible server whose chats are recorded as token-exact turns: for agents that know nothing else.

A session is one agent's work on one task. A request whose messages extend an earlier conversation of its session goes
on with the very tokens of that conversation: what was sampled is never tokenised again, and an end token is not
written twice. One that extends nothing is rendered from the start, and recorded beside the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec
from aiohttp import web

from tandem.broker.wire import MASKED, NO_LOGPROB
from tandem.engines.base import Engine
from tandem.errors import EngineError, EnvError
from tandem.rollout._openai import Chat, Wrong, answer, streamed
from tandem.rollout.chat import Template
from tandem.types import Completion, Json, Message, Sampling, Turn

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Largest request."""
IDLE_SECONDS = 3600.0
"""A session that was begun over HTTP and is not heard of for this long has been abandoned."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A conversation that the policy has spoken in last."""

    tokens: tuple[int, ...]
    turn: int


@dataclass(slots=True)
class Session:
    """One agent's work; ``turns`` is its record."""

    engine: Engine
    """Samples."""
    template: Template
    """Turns messages into tokens."""
    sampling: Sampling
    """How answers are sampled where a request does not say."""
    stream: str
    """Names the random stream."""
    turns: list[Turn] = field(default_factory=list)
    """Everything that was sampled, in the order in which it was answered."""
    messages: tuple[Message, ...] = ()
    """The conversation that was answered last, the answer included."""
    _said: dict[tuple[Message, ...], _Said] = field(default_factory=dict)  # by conversation as ``_alike`` has it
    _asked: int = 0

    async def reply(self, messages: Sequence[Message], sampling: Sampling | None = None) -> tuple[str, Turn]:
        """Let the policy answer a conversation.

        Returns:
            The answer as text, and its record.

        Raises:
            EnvError: the conversation leaves no room in the context, or the chat template refuses it.
            EngineError: the engine failed.
        """
        said, sampling = tuple(messages), sampling or self.sampling
        prompt = tuple(self.prompt(said))
        if len(prompt) >= self.engine.context:
            raise EnvError(
                f"the conversation has {len(prompt)} tokens and the context is {self.engine.context}, so no room is "
                "left for an answer"
            )
        key = hashlib.blake2b(f"{self.stream}/{self._asked}".encode(), digest_size=8).digest()
        self._asked += 1
        completion = await self.engine.generate(prompt, sampling, int.from_bytes(key, "big"))
        turn = Turn(prompt=prompt, completion=completion, temperature=sampling.temperature or 1.0)
        text = self.template.decode(completion.tokens)
        self.messages = (*said, Message(role="assistant", content=text))
        self._said[_alike(self.messages)] = _Said((*prompt, *completion.tokens), len(self.turns))
        self.turns.append(turn)
        return text, turn

    def prompt(self, messages: tuple[Message, ...]) -> list[int]:
        """Token ids of a conversation: those of the longest one that it extends, and what is new."""
        alike = _alike(messages)
        for cut in range(len(messages) - 1, 0, -1):
            if (said := self._said.get(alike[:cut])) is None:
                continue
            new = messages[cut:]
            self.turns[said.turn] = replace(self.turns[said.turn], reply=new)
            return [*said.tokens, *self.template.bridge(messages[: cut - 1], new, last=said.tokens[-1])]
        return self.template.prompt(messages)

    def nodes(self) -> Iterator[dict[str, Json]]:
        """Every conversation that nothing continues, as one sequence each, in the form that Atropos' clients know."""
        whole = [(*turn.prompt, *turn.completion.tokens) for turn in self.turns]
        for tokens, turn in zip(whole, self.turns, strict=True):
            if any(len(other) > len(tokens) and other[: len(tokens)] == tokens for other in whole):
                continue
            masked, logprobs = [MASKED] * len(tokens), [NO_LOGPROB] * len(tokens)
            for part, own in zip(whole, self.turns, strict=True):
                if tokens[: len(part)] == part:
                    masked[len(own.prompt) : len(part)] = own.completion.tokens
                    logprobs[len(own.prompt) : len(part)] = own.completion.logprobs
            yield {
                "tokens": list(tokens),
                "masked_tokens": masked,
                "logprobs": logprobs,
                "metadata": {"finish_reason": turn.completion.finish},
            }


def _alike(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Conversations that are the same to an agent: many strip what the policy said before they send it back."""
    return tuple(replace(m, content=m.content.strip()) if m.role == "assistant" else m for m in messages)


class Proxy:
    """Sessions on one engine."""

    def __init__(
        self,
        engine: Engine,
        template: Template,
        sampling: Sampling,
        *,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``model`` is what requests call the policy; they may say anything. ``clock`` gives seconds."""
        self._engine = engine
        self._template = template
        self._sampling = sampling
        self._model = model
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._heard: dict[str, float] = {}  # when, of those begun over HTTP: the others have an owner who ends them

    def create(self, stream: str = "") -> tuple[str, Session]:
        """Begin a session; its name in URLs, which nobody can guess, and itself."""
        name = secrets.token_hex(16)
        session = Session(self._engine, self._template, self._sampling, stream or name)
        self._sessions[name] = session
        return name, session

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Answer at an address; port 0 is a free one. Gives the URL."""
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_in_openai_form])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/sessions", self._list),
                web.post("/sessions/create", self._create),
                web.get("/{session}/v1/models", self._models),
                web.post("/{session}/v1/chat/completions", self._chat),
                web.get("/{session}/nodes", self._nodes),
                web.delete("/{session}", self._delete),
            ]
        )
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "tandem"}
        return web.json_response({"object": "list", "data": [model]})

    async def _list(self, request: web.Request) -> web.Response:
        found = [{"uuid": name, "turns": len(session.turns)} for name, session in self._sessions.items()]
        return web.json_response({"sessions": found})

    async def _create(self, request: web.Request) -> web.Response:
        late = self._clock() - IDLE_SECONDS
        for abandoned in [name for name, heard in self._heard.items() if heard < late]:
            self._end(abandoned)
        name, _ = self.create()
        self._heard[name] = self._clock()
        return web.json_response({"uuid": name, "base_url": f"{request.scheme}://{request.host}/{name}/v1"})

    async def _nodes(self, request: web.Request) -> web.Response:
        return web.json_response({"nodes": list(self._session(request).nodes())})

    async def _delete(self, request: web.Request) -> web.Response:
        self._session(request)
        self._end(request.match_info["session"])
        return web.json_response({"status": "deleted"})

    def _end(self, name: str) -> None:
        del self._sessions[name]
        self._heard.pop(name, None)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, asked = self._session(request), Chat.read(await request.read())
        sampling, messages = asked.sampling(self._sampling), asked.said()
        found = await asyncio.gather(*(session.reply(messages, sampling) for _ in range(asked.n or 1)))
        answers: list[tuple[str, Completion]] = [(text, turn.completion) for text, turn in found]
        pieces = self._template.pieces if asked.logprobs else None
        body = answer(self._model, answers, len(found[0][1].prompt), int(time.time()), pieces)
        return await streamed(request, body) if asked.stream else web.json_response(body)

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise Wrong("there is no such session; POST /sessions/create begins one", status=404)
        if request.match_info["session"] in self._heard:
            self._heard[request.match_info["session"]] = self._clock()
        return session


@web.middleware
async def _in_openai_form(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
    """Errors as OpenAI's clients expect them."""
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except Wrong as error:
        return _error(str(error), error.status, "invalid_request_error", error.param)
    except EnvError as error:
        return _error(str(error), 400, "invalid_request_error", "messages")
    except EngineError as error:
        log.warning("%s", error)
        return _error(str(error), 502, "api_error")
    except web.HTTPException as error:
        return _error(error.reason, error.status, "invalid_request_error")


def _error(message: str, status: int, kind: str, param: str | None = None) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": None}}
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
