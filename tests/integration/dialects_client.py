"""OpenAI's and Anthropic's own clients against a URL. It runs inside ``.venv-verifiers``, which has both."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import openai

SCHEMA: Any = {"type": "object", "properties": {}}


def main(url: str) -> None:
    """A call, its result and an answer, and the call as a stream, over /v1/responses and /v1/messages."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    response = client.responses.create(model="m", input=items, tools=tools)
    (call,) = response.output
    assert (call.name, call.arguments) == ("add", '{"a": 1}'), response
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    assert client.responses.create(model="m", input=items, tools=tools).output_text == "three"
    with client.responses.stream(model="m", input=items[:1], tools=tools) as stream:
        final = stream.get_final_response()
    assert final.output[0].arguments == '{"a": 1}', final

    other = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    begin: Any = {"model": "m", "max_tokens": 99, "tools": [{"name": "add", "input_schema": SCHEMA}]}
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    message = other.messages.create(messages=messages, **begin)
    (block,) = message.content
    assert (block.name, block.input, message.stop_reason) == ("add", {"a": 1}, "tool_use"), message
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert other.messages.create(messages=messages, **begin).content[0].text == "three"
    with other.messages.stream(messages=messages[:1], **begin) as events:
        last = events.get_final_message()
    assert last.content[0].input == {"a": 1}, last


if __name__ == "__main__":
    main(sys.argv[1])
