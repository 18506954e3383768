"""Anthropic's /v1/messages: requests as chat completions have them, and answers in its own form.

What an answer is made of (a text, calls) and how it is streamed is all that differs: conversations, tools and sampling
are those of chat completions.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.agents.replies import Reply
from tandem.agents.schema import BadRequest
from tandem.types import Json

Fields = dict[str, Any]


def as_chat(fields: Fields) -> Fields:
    """The body of a chat completion that asks for the same; raises BadRequest."""
    read = ("messages", "system", "stop_sequences", "tool_choice")
    rest = {name: value for name, value in fields.items() if name not in read}
    system = _text(fields.get("system"), "system")
    messages = [{"role": "system", "content": system}] if system else []
    for message in fields.get("messages") or ():
        messages += _split(message)
    choice: Mapping[str, Any] = fields.get("tool_choice") or {}
    kinds = {"any": "required", "tool": "required"}
    return {
        **rest, "messages": messages, "stop": fields.get("stop_sequences"),
        "tools": [_tool(tool) for tool in fields.get("tools") or ()],
        "tool_choice": kinds.get(choice.get("type", "auto"), choice.get("type")),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
    }  # fmt: skip


def message_body(model: str, reply: Reply) -> Fields:
    """The answer to a request."""
    content: list[Fields] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    content += ({"type": "tool_use", "id": call.id, "name": call.name, "input": call.value()} for call in reply.calls)
    reason = "tool_use" if reply.calls else "end_turn"
    usage = {"input_tokens": len(reply.turn.prompt), "output_tokens": len(reply.turn.completion.tokens)}
    return {
        "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model,
        "content": content, "stop_reason": "max_tokens" if reply.turn.completion.finish == "length" else reason,
        "stop_sequence": None, "usage": usage,
    }  # fmt: skip


def events(body: Fields) -> Iterator[bytes]:
    """The answer as server-sent events, each part in one piece."""
    for event in _events(body):
        yield f"event: {event['type']}\n".encode() + b"data: " + msgspec.json.encode(event)


def _events(body: Fields) -> Iterator[Fields]:
    begun = {**body, "content": [], "stop_reason": None, "usage": {**body["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(body["content"]):
        is_text = block["type"] == "text"
        empty: Fields = {"text": ""} if is_text else {"input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if is_text
            else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        )
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": body["usage"]}
    yield {"type": "message_stop"}


def _split(message: Fields) -> Iterator[Fields]:
    """One of Anthropic's messages: results of tools, which are messages of their own, come first."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    for block in results:
        text = _text(block.get("content"), "messages")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    rest = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result", "thinking")]
    if rest or calls or not results:
        calling: Fields = {"tool_calls": calls} if calls else {}
        yield {"role": message.get("role"), "content": _text(rest, "messages"), **calling}


def _text(content: Json, param: str) -> str:
    """The text of a content, or of its parts; raises BadRequest where one is no text."""
    if not isinstance(content, list):
        return content or ""
    if other := [part.get("type") for part in content if part.get("type") != "text"]:
        raise BadRequest(f"a part has the type {other[0]}, and the policy reads text alone", param=param)
    return "".join(str(part.get("text", "")) for part in content)


def _tool(tool: Fields) -> Fields:
    """A tool as chat completions have it; one of Anthropic's own, without a schema, as it is, to be refused."""
    if not (schema := tool.get("input_schema")):
        return tool
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}
    return {"type": "function", "function": function}
