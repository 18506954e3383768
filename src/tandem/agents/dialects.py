"""OpenAI's responses and Anthropic's messages: requests as chat completions have them, and answers in their own form.

What an answer is made of (a text, calls) and how it is streamed is all that differs: conversations, tools and sampling
are those of chat completions.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tandem.agents.replies import Reply
from tandem.agents.schema import BadRequest, text_of

Fields = dict[str, Any]


class ChatApi(ABC):
    """How an API writes what chat completions write."""

    @abstractmethod
    def chat(self, fields: Fields) -> Fields:
        """The body of a chat completion that asks for the same; raises BadRequest."""

    @abstractmethod
    def body(self, model: str, reply: Reply, now: int, fields: Fields, chat: Fields) -> Fields:
        """The answer to a request, which as a chat completion is ``chat``."""

    @abstractmethod
    def events(self, body: Fields) -> Iterator[Fields]:
        """The answer as the events of a stream, each with its type."""

    def stream(self, body: Fields) -> Iterator[bytes]:
        """The answer as server-sent events, each part in one piece."""
        for number, event in enumerate(self.events(body)):
            data = msgspec.json.encode(event | ({"sequence_number": number} if "response" in event["type"] else {}))
            yield f"event: {event['type']}\n".encode() + b"data: " + data


class Responses(ChatApi):
    """OpenAI's /v1/responses, with all of the conversation in ``input`` or after ``previous_response_id``."""

    def __init__(self) -> None:
        """Nothing was answered yet."""
        self._conversations: dict[str, list[Fields]] = {}

    def chat(self, fields: Fields) -> Fields:
        read = ("input", "instructions", "previous_response_id", "max_output_tokens", "text")
        rest = {name: value for name, value in fields.items() if name not in read}
        rest["max_tokens"] = fields.get("max_output_tokens")
        if (form := (fields.get("text") or {}).get("format")) and form.get("type") != "text":
            rest["response_format"] = form
        if (before := fields.get("previous_response_id")) and before not in self._conversations:
            raise BadRequest("no response of this episode has this id", param="previous_response_id")
        items = fields.get("input") or []
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        system = [{"role": "system", "content": text}] if (text := fields.get("instructions")) else []
        messages = [*system, *self._conversations.get(before or "", []), *_messages(items)]
        tools = [
            _tool({k: v for k, v in tool.items() if k != "type"}) if tool.get("type") == "function" else tool
            for tool in fields.get("tools") or ()
        ]
        return {**rest, "messages": messages, "tools": tools}

    def body(self, model: str, reply: Reply, now: int, fields: Fields, chat: Fields) -> Fields:
        cut = reply.turn.completion.finish == "length"
        status = "incomplete" if cut else "completed"
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": [part]}
        calls = [
            {"type": "function_call", "id": _id("fc"), "call_id": call.id, "name": call.name, "status": status}
            | {"arguments": call.arguments}
            for call in reply.calls
        ]
        output: list[Fields] = [*([message] if reply.text or not calls else []), *calls]
        read, sampled = len(reply.turn.prompt), len(reply.turn.completion.tokens)
        usage = {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + sampled,
        }  # fmt: skip
        body = {
            "id": _id("resp"), "object": "response", "created_at": now, "status": status, "model": model,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "error": None, "output": output,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": usage,
        }  # fmt: skip
        conversation = chat["messages"][bool(fields.get("instructions")) :]  # which are of one request alone
        self._conversations[str(body["id"])] = [*conversation, *_messages(output)]
        return body

    def events(self, body: Fields) -> Iterator[Fields]:
        begun = {**body, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for at, item in enumerate(body["output"]):
            where = {"output_index": at, "item_id": item["id"]}
            opened = {**item, "status": "in_progress", **({"content": []} if "content" in item else {"arguments": ""})}
            yield {"type": "response.output_item.added", "output_index": at, "item": opened}
            if item["type"] == "message":
                (part,) = item["content"]
                where["content_index"] = 0
                yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
                yield {"type": "response.output_text.delta", **where, "delta": part["text"], "logprobs": []}
                yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
                yield {"type": "response.content_part.done", **where, "part": part}
            else:
                written = {"arguments": item["arguments"], "name": item["name"]}
                yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **where, **written}
            yield {"type": "response.output_item.done", "output_index": at, "item": item}
        yield {"type": f"response.{body['status']}", "response": body}


def _messages(items: Iterable[Fields]) -> list[Fields]:
    """Items of a response as messages; an assistant's text and the calls after it are one, as they were said."""
    messages: list[Fields] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"id": item.get("call_id"), "function": {k: item.get(k) for k in ("name", "arguments")}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in ("message", "function_call_output"):
            role = (
                {"role": item.get("role")} if kind == "message" else {"role": "tool", "tool_call_id": item["call_id"]}
            )
            messages.append({**role, "content": text_of(item.get("content", item.get("output")), "input")})
        elif kind != "reasoning":  # which the policy never writes as an item of its own
            raise BadRequest(f"an item of type {kind} cannot be read", param="input")
    return messages


class Messages(ChatApi):
    """Anthropic's /v1/messages."""

    def chat(self, fields: Fields) -> Fields:
        read = ("messages", "system", "stop_sequences", "tool_choice")
        rest = {name: value for name, value in fields.items() if name not in read}
        system = text_of(fields.get("system"), "system")
        messages = [{"role": "system", "content": system}] if system else []
        for message in fields.get("messages") or ():
            messages += _split(message)
        choice: Mapping[str, Any] = fields.get("tool_choice") or {}
        kinds = {"any": "required", "tool": "required"}
        tools = [
            _tool({"name": tool["name"], "description": tool.get("description", ""), "parameters": schema})
            if (schema := tool.get("input_schema"))
            else tool
            for tool in fields.get("tools") or ()
        ]
        return {
            **rest, "messages": messages, "tools": tools, "stop": fields.get("stop_sequences"),
            "tool_choice": kinds.get(choice.get("type", "auto"), choice.get("type")),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
        }  # fmt: skip

    def body(self, model: str, reply: Reply, now: int, fields: Fields, chat: Fields) -> Fields:
        content: list[Fields] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
        for call in reply.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.value()})
        reason = "tool_use" if reply.calls else "end_turn"
        usage = {"input_tokens": len(reply.turn.prompt), "output_tokens": len(reply.turn.completion.tokens)}
        reason = "max_tokens" if reply.turn.completion.finish == "length" else reason
        return {
            "id": _id("msg"), "type": "message", "role": "assistant", "model": model, "content": content,
            "stop_reason": reason, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def events(self, body: Fields) -> Iterator[Fields]:
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
        text = text_of(block.get("content"), "messages")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    rest = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result", "thinking")]
    if rest or calls or not results:
        calling: Fields = {"tool_calls": calls} if calls else {}
        yield {"role": message.get("role"), "content": text_of(rest, "messages"), **calling}


def _tool(function: Fields) -> Fields:
    return {"type": "function", "function": function}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
