"""Requests to vLLM's own routes: checked, cache-salted, and held back while weights are verified."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from tandem.engines.vllm.protocol import (
    Answers,
    Count,
    Likeliest,
    MinP,
    Penalty,
    Refusal,
    Repetition,
    Stops,
    StopTokens,
    Temperature,
    TopK,
    TopP,
    Whole,
    shallow,
)
from tandem.engines.vllm.server.adapters import allowed, require_free_name
from tandem.engines.vllm.server.asgi import (
    LARGE,
    ClientDisconnected,
    Message,
    Receive,
    Scope,
    Send,
    read,
    refuse,
    replayed,
)
from tandem.engines.vllm.server.frontend import Frontend, Stopped
from tandem.engines.vllm.server.limits import EngineLimits

SALTED = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/invocations",
        "/generative_scoring",
    }
)
"""Stock routes that sample."""
LOADS = "/v1/load_lora_adapter"
"""The stock route that loads an adapter."""
AT_MOST = msgspec.Meta(max_length=4096)
"""Messages of one request, and parts of one message: each costs vLLM a dozen attempts at what it might be."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class StockSampling(msgspec.Struct):
    """Sampling parameters by OpenAI's and vLLM's names; null and what is not here is left to vLLM."""

    n: Answers | None = None
    best_of: Answers | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Whole | None = None
    stop: str | Stops | None = None
    stop_token_ids: StopTokens | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: bool | Likeliest | None = None
    top_logprobs: Likeliest | None = None
    prompt_logprobs: Likeliest | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class StockMessage(msgspec.Struct):
    """A message, or an item of a response's input."""

    content: str | Annotated[list[str | dict[str, Any]], AT_MOST] | None = None


class StockRequest(StockSampling):
    """Request body of one of vLLM's own routes."""

    prompt: str | list[Any] | None = None
    messages: Annotated[list[StockMessage], AT_MOST] | None = None
    input: str | Annotated[list[StockMessage], AT_MOST] | None = None
    sampling_params: StockSampling | None = None

    @property
    def answers(self) -> int:
        """How many it asks for."""
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        return (self.n or 1) * (max(1, len(self.prompt or ())) if several else 1)

    def fits(self, limits: EngineLimits) -> None:
        """Raise Refusal unless the engine can be asked this."""
        limits.answers(self.answers)
        for options in (self, self.sampling_params or StockSampling()):
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
                limits.length(name, getattr(options, name) or 0)
            limits.tokens("stop_token_ids", options.stop_token_ids or ())
            limits.tokens("allowed_token_ids", options.allowed_token_ids or ())
        if isinstance(self.prompt, list):
            _prompts(self.prompt, limits)


def _prompts(prompt: list[Any], limits: EngineLimits) -> None:
    """Raise Refusal unless it is one prompt as token ids, or several of whatever form."""
    if not prompt:
        raise Refusal(400, "prompt is an empty list")
    for tokens in [prompt] if isinstance(prompt[0], int) else prompt:
        if isinstance(tokens, list):
            if not all(type(token) is int for token in tokens):
                raise Refusal(400, "prompt is a list of something else than texts or token ids")
            limits.prompt(tokens)
        elif not isinstance(tokens, str):
            raise Refusal(400, f"prompt is a list with {type(tokens).__name__} in it, not of texts or token ids")


def sound(body: bytes) -> dict[str, Any]:
    """A body as JSON.

    Raises:
        Refusal: it is none, or no object, or what cannot be passed on.
    """
    try:
        tree = msgspec.json.decode(body)
        if not isinstance(tree, dict):
            raise ValueError(f"it is no object but {type(tree).__name__}")
        shallow(tree)
    except (ValueError, RecursionError) as error:  # as msgspec's errors are
        raise Refusal(400, f"the request's body is not as expected: {error}") from error
    return tree


def salted(tree: dict[str, Any], salt: str) -> bytes:
    """The body with a cache salt, its own one mixed in; as it is where vLLM itself must say what is wrong."""
    given_salt = tree.get("cache_salt")
    if given_salt is not None and (not isinstance(given_salt, str) or not given_salt):
        return json.dumps(tree).encode()
    if given_salt:  # as a digest, for the length and the characters of a salt are limited
        salt = f"{salt}-{hashlib.blake2b(given_salt.encode(), digest_size=16).hexdigest()}"
    return json.dumps({**tree, "cache_salt": salt}).encode()


class Stock:
    """Middleware before vLLM's own routes (``app``): checks, cache salts, and pauses."""

    def __init__(self, app: App, frontend: Frontend, limits: EngineLimits):
        self._app = app
        self._front = frontend
        self._limits = limits

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        waits = path in SALTED or path == LOADS
        if scope["method"] != "POST" or not (waits or _is_json(scope)):
            await self._app(scope, receive, send)
            return
        try:
            body = await read(receive, LARGE)
            tree = sound(body) if body or waits else {}
            if path == LOADS:
                require_free_name(str(tree.get("lora_name", "")))
                allowed(str(tree.get("lora_path", "")))
            answers = self._answers(tree) if path in SALTED else 0
        except (Refusal, ClientDisconnected) as error:
            await refuse(send, error)
            return
        if waits:
            await self._held(tree, answers, scope, receive, send)
        else:
            await self._app(scope, replayed(body, receive, self._front.broken_off), send)

    def _answers(self, tree: dict[str, Any]) -> int:
        """How many answers a sampling request asks for; raises Refusal where vLLM, or this engine, cannot be asked."""
        try:
            request = msgspec.convert(tree, StockRequest, strict=False)
        except msgspec.ValidationError as error:
            raise Refusal(400, f"the request's body is not as expected: {error}") from error
        request.fits(self._limits)
        return request.answers

    async def _held(self, tree: dict[str, Any], answers: int, scope: Scope, receive: Receive, send: Send) -> None:
        """What must not be answered from weights that are not proven; ``answers`` above 0 is what samples."""
        begun, front = False, self._front

        async def verified(message: Message) -> None:
            nonlocal begun
            await front.deliverable(None if front.generation != generation else generation)
            begun = True
            await send(message)

        try:
            async with front.admitted(answers), front.places.counted():
                generation = front.generation
                body = salted(tree, front.salt) if answers else json.dumps(tree).encode()
                headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
                headers.append((b"content-length", str(len(body)).encode()))
                await self._app({**scope, "headers": headers}, replayed(body, receive, front.broken_off), verified)
        except (Refusal, Stopped, ClientDisconnected) as error:
            if begun:
                raise  # too late for a status: the connection breaks off, which no client takes for a whole answer
            await refuse(send, error)


def _is_json(scope: Scope) -> bool:
    return b"json" in dict(scope["headers"]).get(b"content-type", b"").lower()
