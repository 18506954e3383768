"""Anthropic's own client against a URL. It runs inside ``.venv-verifiers``, which has it."""

from __future__ import annotations

import sys
from typing import Any

import anthropic

SCHEMA: Any = {"type": "object", "properties": {}}


def main(url: str) -> None:
    """A call, its result and an answer, and the call as a stream."""
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    begin: Any = {"model": "m", "max_tokens": 99, "tools": [{"name": "add", "input_schema": SCHEMA}]}
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    message = client.messages.create(messages=messages, **begin)
    (block,) = message.content
    assert (block.name, block.input, message.stop_reason) == ("add", {"a": 1}, "tool_use"), message
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=messages, **begin).content[0].text == "three"
    with client.messages.stream(messages=messages[:1], **begin) as events:
        last = events.get_final_message()
    assert last.content[0].input == {"a": 1}, last


if __name__ == "__main__":
    main(sys.argv[1])
