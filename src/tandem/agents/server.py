"""OpenAI-compatible server for agents, whose chats are recorded as token-exact turns.

A session is one agent's work on one task. A request whose messages extend an earlier conversation of its session goes
on with the very tokens of that conversation: what was sampled is never tokenised again, calls of tools included, and an
end token is not written twice. One that extends nothing is rendered from the start, and recorded beside the others.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
from aiohttp import web

from tandem.agents.replies import Reply, chat_body, streamed, text_body
from tandem.agents.schema import BadRequest, ChatRequest, CompletionRequest, TextRequest
from tandem.agents.tool_calls import ToolMessage, ToolOffer, alike, as_text, read
from tandem.engines.base import Engine
from tandem.errors import Deadline, EngineError, EnvError
from tandem.rollout.template import Template
from tandem.rollout.turns import sample_turn, untrainable_option, why_untrainable
from tandem.together import together
from tandem.types import MASKED, NO_LOGPROB, Json, Message, Sampling, Turn

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Largest request."""
IDLE_SECONDS = 3600.0
"""A session that was begun over HTTP and is not heard of for this long has been abandoned."""


NONE = ToolOffer()
"""No tools."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation that the policy has spoken in last."""

    tokens: tuple[int, ...]
    turn: int
    messages: tuple[Message, ...]  # as people read it


@dataclass(slots=True)
class Session:
    """One agent's work on one task; ``turns`` is its record."""

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
    """The conversation that was answered last, the answer included; what the policy said is as it was sampled."""
    failure: EngineError | Deadline | None = None
    """What the engine said instead of its last answer."""
    # By the tools that were offered, and the conversation as agents tell them apart.
    _conversations: dict[tuple[str, tuple[Message, ...]], _Conversation] = field(default_factory=dict)
    _written: dict[str, _Conversation] = field(default_factory=dict)  # by text
    _numbers: Iterator[int] = field(default_factory=count)

    async def reply(
        self, messages: Sequence[Message], sampling: Sampling | None = None, offer: ToolOffer = NONE
    ) -> Reply:
        """Let the policy answer a conversation.

        Raises:
            EnvError: the conversation leaves no room in the context, the chat template refuses it, or ``sampling``
                differs from the session's in what a turn does not record.
            EngineError: the engine failed.
        """
        conversation, sampling = tuple(messages), sampling or self.sampling
        form = self.template.speech.form if offer.tools else None
        # A form whose calls end with a text of their own is kept to one call by ending there.
        ends = (form.stop,) if form is not None and form.stop and offer.single else ()
        prompt, before = self._prompt(conversation, offer)
        turn = await self._sample(prompt, replace(sampling, stop=(*sampling.stop, *ends)))
        whole = self.template.decode(turn.completion.tokens)
        text, calls = read(form, offer, _cut(whole, sampling.stop))
        key = (*conversation, ToolMessage(role="assistant", content=text, calls=calls))
        self._conversations[offer.key, _alike(key)] = self._noted(turn, before, whole)
        return Reply(text=text, calls=calls, turn=turn)

    async def complete(self, prompt: str | Sequence[int], sampling: Sampling | None = None) -> Reply:
        """Let the policy go on with text, or with token ids.

        Raises:
            EnvError: the prompt leaves no room in the context, or ``sampling`` is another than may be, as in ``reply``.
            EngineError: the engine failed.
        """
        sampling = sampling or self.sampling
        written = prompt if isinstance(prompt, str) else self.template.decode(prompt)
        tokens, before = self._begun(prompt) if isinstance(prompt, str) else (list(prompt), _user(written))
        turn = await self._sample(tokens, sampling)
        text = self.template.decode(turn.completion.tokens)
        self._written[written + text] = self._noted(turn, before, text)
        return Reply(text=_cut(text, sampling.stop), turn=turn)

    @contextmanager
    def played(self) -> Iterator[None]:
        """Around an agent's work: an engine that failed is told as that, whatever the agent made of it.

        Raises:
            EngineError, Deadline: the last request got no answer, and the agent has ended, by an error or not.
        """
        try:
            yield
        except Exception as error:
            if self.failure is None:
                raise
            raise self.failure from error
        if self.failure is not None:
            raise self.failure

    async def _sample(self, prompt: Sequence[int], sampling: Sampling) -> Turn:
        """Sample after a prompt, and record it."""
        if (name := untrainable_option(self.sampling, sampling)) is not None:
            raise EnvError(why_untrainable(name, self.sampling, sampling))
        if len(prompt) >= self.engine.context:
            raise EnvError(
                f"the conversation has {len(prompt)} tokens and the context is {self.engine.context}, so no room is "
                "left for an answer"
            )
        # Cut before anything may end it, the answer is sampled in the same way.
        cut = replace(sampling, min_tokens=min(sampling.min_tokens, sampling.max_tokens))
        try:
            turn = await sample_turn(self.engine, prompt, cut, f"{self.stream}/{next(self._numbers)}")
        except (EngineError, Deadline) as error:
            self.failure = error
            raise
        self.failure = None
        self.turns.append(turn)
        return turn

    def _noted(self, turn: Turn, before: tuple[Message, ...], text: str) -> _Conversation:
        """What was said up to now, the newest turn included."""
        self.messages = (*before, Message(role="assistant", content=text))
        return _Conversation((*turn.prompt, *turn.completion.tokens), len(self.turns) - 1, self.messages)

    def _prompt(self, messages: tuple[Message, ...], offer: ToolOffer) -> tuple[list[int], tuple[Message, ...]]:
        """A conversation as token ids, those of the longest one that it extends and what is new; and for people."""
        same = _alike(messages)
        for cut in range(len(messages) - 1, 0, -1):
            if (earlier := self._conversations.get((offer.key, same[:cut]))) is None:
                continue
            new = messages[cut:]
            bridge = self.template.bridge(messages[: cut - 1], new, last=earlier.tokens[-1], tools=offer.tools)
            return [*earlier.tokens, *bridge], self._answered(earlier, tuple(map(as_text, new)))
        return self.template.prompt(messages, offer.tools), tuple(map(as_text, messages))

    def _begun(self, text: str) -> tuple[list[int], tuple[Message, ...]]:
        """The same of a text."""
        known = max((known for known in self._written if text.startswith(known)), key=len, default=None)
        if known is None:
            return self.template.text(text), _user(text)
        earlier, new = self._written[known], text[len(known) :]
        # An end token is no text: where the agent does not write it, it is not there.
        tokens = earlier.tokens[:-1] if self.template.ends(earlier.tokens[-1]) else earlier.tokens
        return [*tokens, *self.template.more(new)], self._answered(earlier, _user(new))

    def _answered(self, earlier: _Conversation, new: tuple[Message, ...]) -> tuple[Message, ...]:
        """Note what the agent said next; all that was said."""
        self.turns[earlier.turn] = replace(self.turns[earlier.turn], reply=new)
        return (*earlier.messages, *new)

    def nodes(self) -> Iterator[dict[str, Json]]:
        """Every conversation that nothing continues, as one sequence each, in the form that Atropos' clients know.

        One that goes on at another temperature is a sequence of its own, for a sequence has one.
        """
        whole = [((*turn.prompt, *turn.completion.tokens), turn) for turn in self.turns]
        for tokens, turn in whole:
            alike = [(other, own) for other, own in whole if own.temperature == turn.temperature]
            if any(len(other) > len(tokens) and other[: len(tokens)] == tokens for other, _ in alike):
                continue
            masked, logprobs = [MASKED] * len(tokens), [NO_LOGPROB] * len(tokens)
            for part, own in alike:
                if tokens[: len(part)] == part:
                    masked[len(own.prompt) : len(part)] = own.completion.tokens
                    logprobs[len(own.prompt) : len(part)] = own.completion.logprobs
            yield {
                "tokens": list(tokens),
                "masked_tokens": masked,
                "logprobs": logprobs,
                "metadata": {"finish_reason": turn.completion.finish, "temperature": turn.temperature},
            }


def _alike(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Conversations that are the same to an agent."""
    return tuple(map(alike, messages))


def _user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),) if text else ()


def _cut(text: str, stop: Sequence[str]) -> str:
    """A text up to the first stop text, which is sampled and recorded but no part of an answer."""
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]


class Proxy:
    """HTTP server of sessions on one engine."""

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
        """Begin a session; its unguessable name in URLs, and itself."""
        name = secrets.token_hex(16)
        session = Session(self._engine, self._template, self._sampling, stream or name)
        self._sessions[name] = session
        return name, session

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve at an address; port 0 is a free one. Gives the URL."""
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
                web.post("/{session}/v1/completions", self._complete),
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
        sessions = [{"uuid": name, "turns": len(session.turns)} for name, session in self._sessions.items()]
        return web.json_response({"sessions": sessions})

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
        session, options = self._session(request), ChatRequest.read(await request.read())
        sampling, messages = options.sampling(self._sampling), options.conversation()
        offer = options.offer(self._template.speech) if options.tools else NONE
        # An answer that is still sampled when another fails would be recorded and go to nobody.
        replies = await together(session.reply(messages, sampling, offer) for _ in range(options.answers))
        pieces = self._template.pieces if options.logprobs else None
        body = chat_body(self._model, replies, int(time.time()), pieces, ids=bool(options.return_token_ids))
        return await self._respond(request, options, body)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session, options = self._session(request), TextRequest.read(await request.read())
        sampling, prompts = options.sampling(self._sampling), options.prompts(self._template.vocabulary)
        wanted = [prompt for prompt in prompts for _ in range(options.answers)]
        replies = await together(session.complete(prompt, sampling) for prompt in wanted)
        each = [replies[at : at + options.answers] for at in range(0, len(replies), options.answers)]
        pieces = None if options.logprobs is None else self._template.pieces
        body = text_body(self._model, each, int(time.time()), pieces, ids=bool(options.return_token_ids))
        return await self._respond(request, options, body)

    async def _respond(
        self, request: web.Request, options: CompletionRequest, body: dict[str, Json]
    ) -> web.StreamResponse:
        if options.stream:
            return await streamed(request, body, counted=options.counted)
        return web.json_response(body)

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise BadRequest("there is no such session; POST /sessions/create begins one", status=404)
        if request.match_info["session"] in self._heard:
            self._heard[request.match_info["session"]] = self._clock()
        return session


@web.middleware
async def _in_openai_form(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
    """Errors as OpenAI's clients expect them."""
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except BadRequest as error:
        return _error(str(error), error.status, "invalid_request_error", error.param)
    except EnvError as error:
        return _error(str(error), 400, "invalid_request_error", "messages")
    except (EngineError, Deadline) as error:
        log.warning("%s", error)
        return _error(str(error), 502, "api_error")
    except web.HTTPException as error:
        return _error(error.reason, error.status, "invalid_request_error")


def _error(message: str, status: int, kind: str, param: str | None = None) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": None}}
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
