"""Server for agents that speak OpenAI's APIs or Anthropic's, whose chats are recorded as token-exact turns.

A session is one agent's work on one task. A request whose messages extend an earlier conversation of its session goes
on with the very tokens of that conversation: what was sampled is never tokenised again, calls of tools included, and an
end token is not written twice. One that extends nothing is rendered from the start, and recorded beside the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tandem import doors
from tandem.agents.dialects import ChatApi, Messages, Responses
from tandem.agents.replies import Reply, chunks, reply_body, streamed
from tandem.agents.schema import BadRequest, ChatRequest, CompletionRequest, TextRequest
from tandem.agents.tool_calls import ToolOffer, alike, as_text, read, spoken
from tandem.engines.base import Sampler
from tandem.errors import Deadline, EngineError, EnvError
from tandem.rollout.template import Template
from tandem.rollout.turns import sample_turn
from tandem.together import together
from tandem.types import Message, Sampling, Turn

T = TypeVar("T")
log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
"""Largest request."""
INLINE_BYTES = 1 << 15
"""Requests up to this size are read and tokenised on the event loop; longer ones in a thread."""
IDLE_SECONDS = 60.0
"""An agent's connection is closed after so long without a request: file descriptors are the trainer's."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation that the policy has spoken in last."""

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]  # as people read it


@dataclass(slots=True)
class Session:
    """One agent's work on one task; ``turns`` is its record."""

    engine: Sampler
    template: Template
    """Turns messages into tokens."""
    sampling: Sampling
    """How answers are sampled where a request does not say."""
    stream: str
    """Names the random stream."""
    trained: bool = True
    """False: nothing is trained on it, so that requests may ask for any sampling."""
    turns: list[Turn] = field(default_factory=list)
    """Everything that was sampled, in the order in which it was answered."""
    messages: tuple[Message, ...] = ()
    """The conversation that was answered last, the answer included; what the policy said is as it was sampled."""
    failure: EngineError | Deadline | None = None
    """What the engine said instead of its last answer."""
    _conversations: dict[bytes, _Conversation] = field(default_factory=dict)  # by ``_extended`` key
    _numbers: Iterator[int] = field(default_factory=count)
    apis: dict[str, ChatApi] = field(default_factory=lambda: {"responses": Responses(), "messages": Messages()})
    """Other APIs than chat completions; what was said in this session is known to no other."""

    async def reply(
        self, messages: Sequence[Message], sampling: Sampling, offer: ToolOffer, answers: int = 1
    ) -> list[Reply]:
        """Let the policy answer a conversation, several times if asked.

        Raises:
            EnvError: the conversation leaves no room in the context, or the chat template refuses it.
            EngineError: the engine failed.
        """
        conversation = tuple(messages)
        numbers = [next(self._numbers) for _ in range(answers)]
        size = sum(64 + len(message.content) for message in conversation)
        tokens, key, before = await _aside(size, partial(self._prompt, conversation, offer))
        form = self.template.speech.form if offer.tools else None
        # A form whose calls end with a text of their own is kept to one call by ending there.
        ends = (form.stop,) if form is not None and form.stop and offer.single else ()
        ending = replace(sampling, stop=(*sampling.stop, *ends))

        async def answer_once(number: int) -> Reply:
            turn = await self._sample(tokens, ending, number)
            whole = self.template.decode(turn.completion.tokens)
            text, calls = read(form, offer, _cut(whole, sampling.stop))
            self.messages = (*before, Message(role="assistant", content=whole))
            known = _Conversation((*turn.prompt, *turn.completion.tokens), self.messages)
            self._conversations[_extended(key, spoken(text, calls))] = known
            return Reply(text=text, calls=calls, turn=turn)

        # An answer that is still sampled when another fails would be recorded and go to nobody.
        return await together(map(answer_once, numbers))

    async def complete(self, prompt: str | Sequence[int], sampling: Sampling, answers: int = 1) -> list[Reply]:
        """Let the policy go on with text, or with token ids, several times if asked.

        Raises:
            EnvError: the prompt leaves no room in the context.
            EngineError: the engine failed.
        """
        numbers = [next(self._numbers) for _ in range(answers)]
        if isinstance(prompt, str):
            text, tokens = prompt, await _aside(len(prompt), partial(self.template.text, prompt))
        else:
            text, tokens = self.template.decode(prompt), list(prompt)

        async def answer_once(number: int) -> Reply:
            turn = await self._sample(tokens, sampling, number)
            answer = self.template.decode(turn.completion.tokens)
            self.messages = (Message(role="user", content=text), Message(role="assistant", content=answer))
            return Reply(text=_cut(answer, sampling.stop), turn=turn)

        return await together(map(answer_once, numbers))

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

    async def _sample(self, prompt: Sequence[int], sampling: Sampling, number: int) -> Turn:
        """Sample after a prompt, and record it."""
        if len(prompt) >= self.engine.context:
            raise EnvError(f"a conversation of {len(prompt)} tokens fills the context of {self.engine.context}")
        # Cut before anything may end it, the answer is sampled in the same way.
        cut = replace(sampling, min_tokens=min(sampling.min_tokens, sampling.max_tokens))
        try:
            turn = await sample_turn(self.engine, prompt, cut, f"{self.stream}/{number}")
        except (EngineError, Deadline) as error:
            self.failure = error
            raise
        self.failure = None
        self.turns.append(turn)
        return turn

    def _prompt(
        self, messages: tuple[Message, ...], offer: ToolOffer
    ) -> tuple[Sequence[int], bytes, tuple[Message, ...]]:
        """A conversation as token ids, its key, and its messages as people read them.

        The ids are those of the longest conversation that it extends, and of what is new.
        """
        keys = list(accumulate(messages, _extended, initial=offer.key))
        for cut in range(len(messages) - 1, 0, -1):
            if (earlier := self._conversations.get(keys[cut])) is not None:
                before, new = messages[: cut - 1], messages[cut:]
                last = earlier.tokens[-1]
                bridge = self.template.bridge(before, new, last, offer.tools, offer.template_options)
                return [*earlier.tokens, *bridge], keys[-1], (*earlier.messages, *map(as_text, new))
        tokens = self.template.prompt(messages, offer.tools, offer.template_options)
        return tokens, keys[-1], tuple(map(as_text, messages))


def _extended(key: bytes, message: Message) -> bytes:
    """Key of a conversation with one more message, the same for all that are the same to an agent."""
    return hashlib.blake2b(key + repr(alike(message)).encode(), digest_size=16).digest()


async def _aside(size: int, work: Callable[[], T]) -> T:
    """Do what takes long in a thread, so that the trainer's event loop goes on."""
    if size <= INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)


def _cut(text: str, stop: Sequence[str]) -> str:
    """A text up to the first stop text, which is sampled and recorded but no part of an answer."""
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]


class Proxy:
    """HTTP server of one session. Its path holds a key, which only the session's agent is told."""

    base = "/{key}/v1"
    """Path of a session's API."""

    def __init__(self, session: Session, *, model: str):
        """``model`` is what requests call the policy; they may say anything. The API is at ``URL/KEY/v1``."""
        self.session = session
        self._model = model
        self.key = secrets.token_urlsafe(24)

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve at an address; port 0 is a free one. Gives the URL."""
        app = self.application()
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=IDLE_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_in_openai_form])
        app.router.add_get(f"{self.base}/models", self._models)
        app.router.add_post(f"{self.base}/chat/completions", self._chat)
        app.router.add_post(f"{self.base}/completions", self._complete)
        app.router.add_post(self.base + "/{dialect:responses|messages}", self._speak)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "tandem"}
        return web.json_response({"object": "list", "data": [model]})

    async def _speak(self, request: web.Request) -> web.StreamResponse:
        session, name = self._session(request), request.match_info["dialect"]
        dialect = session.apis[name]
        try:
            fields = msgspec.json.decode(await request.read(), type=dict[str, Any])
            chat = dialect.chat(fields)
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
            raise BadRequest(f"the body is none of /v1/{name}: {error}") from error
        options = ChatRequest.read(msgspec.json.encode(chat))
        offer = options.offer(self.session.template.speech)
        sampling = options.sampling(session.sampling, trained=session.trained)
        (reply,) = await session.reply(options.conversation(), sampling, offer)
        body = dialect.body(self._model, reply, int(time.time()), fields, chat)
        return await streamed(request, dialect.stream(body)) if options.stream else web.json_response(body)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, content = self._session(request), await request.read()
        options = await _aside(len(content), partial(ChatRequest.read, content))
        sampling = options.sampling(session.sampling, trained=session.trained)
        offer = options.offer(session.template.speech)
        replies = await session.reply(options.conversation(), sampling, offer, options.answers)
        return await self._respond(request, options, [replies], bool(options.logprobs))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session, content = self._session(request), await request.read()
        options = await _aside(len(content), partial(TextRequest.read, content))
        sampling = options.sampling(session.sampling, trained=session.trained)
        prompts = options.prompts(session.template.vocabulary)
        each = await together(session.complete(prompt, sampling, options.answers) for prompt in prompts)
        return await self._respond(request, options, each, options.logprobs is not None)

    async def _respond(
        self, request: web.Request, options: CompletionRequest, answers: Sequence[Sequence[Reply]], logprobs: bool
    ) -> web.StreamResponse:
        is_chat, ids = isinstance(options, ChatRequest), bool(options.return_token_ids)
        pieces = self.session.template.pieces if logprobs else None
        body = reply_body(self._model, answers, int(time.time()), pieces, is_chat=is_chat, ids=ids)
        if options.stream:
            events = (b"data: " + msgspec.json.encode(chunk) for chunk in chunks(body, counted=options.counted))
            return await streamed(request, (*events, b"data: [DONE]"))
        return web.json_response(body)

    def _session(self, request: web.Request) -> Session:
        if request.match_info["key"] != self.key:
            raise BadRequest("no episode has this key; use the base URL that the agent was given", status=401)
        return self.session


@web.middleware
async def _in_openai_form(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
    """Errors as OpenAI's clients expect them."""
    try:
        if why := doors.from_a_page(request.method, request.headers, acts=request.method != "GET"):
            raise BadRequest(why, status=403)
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
    body = {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": None}}
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
