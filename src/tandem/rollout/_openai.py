"""OpenAI's chat completions, as far as a policy that speaks text can answer them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import msgspec
from aiohttp import web

from tandem.types import Completion, Json, Message, Sampling

MOST = 128
"""Most answers of one request."""


class Wrong(Exception):
    """A request that cannot be answered; ``status`` is HTTP's, ``param`` what is wrong in it."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.status = status


class _Said(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


class Chat(msgspec.Struct, kw_only=True):
    """Body of /v1/chat/completions. Fields that would change the answer and cannot be obeyed are refused."""

    messages: list[_Said]
    """The conversation."""
    n: int | None = None
    """Answers."""
    max_tokens: int | None = None
    """Most tokens of one answer."""
    max_completion_tokens: int | None = None
    """The same by its newer name."""
    temperature: float | None = None
    """As in ``Sampling``."""
    top_p: float | None = None
    """As in ``Sampling``."""
    stop: str | list[str] | None = None
    """Texts that end an answer."""
    stream: bool | None = None
    """Answer in events; they come when all is sampled."""
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    """Tell the logprob of each sampled token."""
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """A request.

        Raises:
            Wrong: it is none, or asks for what cannot be done.
        """
        try:
            asked = msgspec.json.decode(body, type=cls, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Wrong(f"the body is no chat completion's: {error}") from error
        for name in ("tools", "functions", "logit_bias", "presence_penalty", "frequency_penalty"):
            if getattr(asked, name):
                raise Wrong(f"{name} cannot be obeyed: the policy answers in plain text", param=name)
        if asked.top_logprobs:
            raise Wrong("top_logprobs cannot be told: those of the sampled tokens alone are kept", param="top_logprobs")
        if (asked.response_format or {}).get("type", "text") != "text":
            raise Wrong("response_format cannot be obeyed: the policy answers in plain text", param="response_format")
        if not asked.messages:
            raise Wrong("messages are empty", param="messages")
        if not 1 <= (1 if asked.n is None else asked.n) <= MOST:
            raise Wrong(f"n must be from 1 to {MOST}", param="n")
        return asked

    def said(self) -> tuple[Message, ...]:
        """The conversation in our words."""
        return tuple(Message(role=message.role, content=_text(message)) for message in self.messages)

    def sampling(self, own: Sampling) -> Sampling:
        """``own``, but for what the request says.

        Raises:
            Wrong: a number is out of range.
        """
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        given: dict[str, Any] = {"max_tokens": limit, "temperature": self.temperature, "top_p": self.top_p}
        if self.stop is not None:
            given["stop"] = tuple(text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text)
        made = replace(own, **{name: value for name, value in given.items() if value is not None})
        fine = {
            "max_tokens": made.max_tokens >= 1,
            "temperature": 0 <= made.temperature < math.inf,
            "top_p": 0 < made.top_p <= 1,
        }
        for name, is_fine in fine.items():
            if not is_fine:
                raise Wrong(f"{name} is out of range", param=name)
        return made


def answer(
    model: str,
    answers: Sequence[tuple[str, Completion]],
    prompt_tokens: int,
    now: int,
    pieces: Callable[[Sequence[int]], list[str]] | None = None,
) -> dict[str, Json]:
    """Body of the answer; of each choice its text and how it was sampled.

    Args:
        model: what the policy is called.
        answers: of each choice.
        prompt_tokens: of the one prompt of all.
        now: seconds since 1970.
        pieces: text of each token, where logprobs are asked for.
    """
    sampled = sum(len(completion.tokens) for _, completion in answers)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": now,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "length" if completion.finish == "length" else "stop",
                "logprobs": None if pieces is None else {"content": _logprobs(completion, pieces)},
            }
            for index, (text, completion) in enumerate(answers)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    }


async def streamed(request: web.Request, body: dict[str, Json]) -> web.StreamResponse:
    """An answer as server-sent events, each choice in one piece."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    head = {**body, "object": "chat.completion.chunk"}
    del head["usage"]
    for choice in body["choices"]:
        delta = {k: choice[k] for k in ("index", "logprobs")} | {"delta": choice["message"], "finish_reason": None}
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        for part in (delta, last):
            await response.write(b"data: " + msgspec.json.encode({**head, "choices": [part]}) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _logprobs(completion: Completion, pieces: Callable[[Sequence[int]], list[str]]) -> list[Json]:
    """Of each sampled token, an end token too. A token that is no whole character has no text of its own."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(pieces(completion.tokens), completion.logprobs, strict=True)
    ]


def _text(message: _Said) -> str:
    """Text of a message.

    Raises:
        Wrong: it has parts that are no text.
    """
    if message.tool_calls:
        raise Wrong("tool_calls cannot be read: the policy speaks plain text", param="messages")
    if not isinstance(message.content, list):
        return message.content or ""
    if other := [part.get("type") for part in message.content if part.get("type") != "text"]:
        raise Wrong(f"a message has a part of type {other[0]}, and the policy reads text alone", param="messages")
    return "".join(str(part.get("text", "")) for part in message.content)
