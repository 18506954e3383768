"""OpenAI's own client against a URL. It runs inside ``.venv-atropos``: ``python openai_client.py URL``."""

from __future__ import annotations

import sys
from typing import Any

import openai

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def main(url: str) -> None:
    """A call, its result, an answer; the same as a stream; a completion."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    choice = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}'), call
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    choice = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("three", "stop"), choice

    with client.chat.completions.stream(
        model="m", messages=messages[:1], tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        last = stream.get_final_completion()
    (call,) = last.choices[0].message.tool_calls
    assert call.function.arguments == '{"a": 1}', last
    assert last.usage.completion_tokens > 10, last

    done = client.completions.create(model="m", prompt="x", logprobs=0)
    assert done.choices[0].text == "three", done
    assert len(done.choices[0].logprobs.token_logprobs) == 6, done
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(model="m", prompt="x", stream=True))
    assert text == "<call>", text
    odd: Any = {"tool_choice": "required", "temperature": 0, "seed": 7, "response_format": {"type": "json_object"}}
    choice = client.chat.completions.create(model="m", messages=messages[:1], tools=TOOLS, **odd).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    refused = ""
    other = openai.OpenAI(base_url=url.replace("/v1", "x/v1"), api_key="none", max_retries=0)
    try:
        other.chat.completions.create(model="m", messages=messages[:1])
    except openai.AuthenticationError as error:
        refused = str(error)
    assert "no episode has this key" in refused, refused


main(sys.argv[1])
