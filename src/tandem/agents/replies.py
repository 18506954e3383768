"""Response bodies of OpenAI's chat completions and completions, plain or streamed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from aiohttp import web

from tandem.agents.tool_calls import ToolCall
from tandem.types import Completion, Json, Turn

Pieces = Callable[[Sequence[int]], list[str]]
"""Text of each token on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply of the policy: text, tool calls and the sampled turn."""

    text: str
    """Its text, without calls of tools and without a stop text."""
    calls: tuple[ToolCall, ...] = ()
    """The tools that it calls."""
    turn: Turn
    """How it was sampled."""


def reply_body(
    model: str, answers: Sequence[Sequence[Reply]], now: int, pieces: Pieces | None, *, is_chat: bool, ids: bool
) -> dict[str, Json]:
    """Body of an answer.

    Args:
        model: what the policy is called.
        answers: to each prompt.
        now: seconds since 1970.
        pieces: text of each token, where logprobs are asked for.
        is_chat: a chat's answer, else a completion's.
        ids: tell the sampled token ids.
    """
    choices = [
        {
            "index": index,
            **({"message": _message(answer)} if is_chat else {"text": answer.text}),
            "finish_reason": _finish(answer),
            **({"token_ids": list(answer.turn.completion.tokens)} if ids else {}),
            "logprobs": None if pieces is None else _logprobs(answer.turn.completion, pieces, is_chat),
        }
        for index, answer in enumerate(answer for some in answers for answer in some)
    ]
    name, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
    head = {"id": f"{name}-{secrets.token_hex(12)}", "object": kind, "created": now, "model": model}
    return {**head, "choices": choices, "usage": _usage(answers)}


def chunks(body: dict[str, Json], *, counted: bool) -> Iterator[dict[str, Json]]:
    """An answer as the events of a stream, each choice in one piece; ``counted``: with counts of tokens at the end."""
    is_chat = body["object"] == "chat.completion"
    head = {**body, "object": "chat.completion.chunk" if is_chat else body["object"]}
    usage = head.pop("usage")
    for choice in body["choices"]:
        if is_chat:
            delta = choice.pop("message")
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
            choice["delta"] = delta
        yield {**head, "choices": [choice]}
    if counted:
        yield {**head, "choices": [], "usage": usage}


async def streamed(request: web.Request, events: Iterable[bytes]) -> web.StreamResponse:
    """Server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        await response.write(event + b"\n\n")
    await response.write_eof()
    return response


def _message(answer: Reply) -> dict[str, Json]:
    if not answer.calls:
        return {"role": "assistant", "content": answer.text}
    calls = [call.written(call.arguments) for call in answer.calls]
    return {"role": "assistant", "content": answer.text or None, "tool_calls": calls}


def _finish(answer: Reply) -> str:
    if answer.turn.completion.finish == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _usage(answers: Sequence[Sequence[Reply]]) -> dict[str, Json]:
    """Counts; several answers to one prompt have read it once."""
    read = sum(len(some[0].turn.prompt) for some in answers)
    sampled = sum(len(answer.turn.completion.tokens) for some in answers for answer in some)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _logprobs(completion: Completion, pieces: Pieces, is_chat: bool) -> dict[str, Json]:
    """Of each sampled token, an end token too. A token that is no whole character has no text of its own."""
    texts = pieces(completion.tokens)
    if not is_chat:
        starts = list(accumulate(map(len, texts), initial=0))[:-1]
        return {"tokens": texts, "token_logprobs": completion.logprobs, "top_logprobs": None, "text_offset": starts}
    pairs = zip(texts, completion.logprobs, strict=True)
    return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]}
