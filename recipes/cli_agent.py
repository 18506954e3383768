"""A command-line agent of Anthropic's client, with a stream and a tool; ANTHROPIC_BASE_URL is all it is given."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

TOOLS: Any = [
    {
        "name": "letters",
        "description": "Count the letters of a word.",
        "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    }
]
client = anthropic.Anthropic(max_retries=0)
messages: list[Any] = json.load(sys.stdin)["messages"]
for _ in range(3):
    with client.messages.stream(model="policy", max_tokens=24, messages=messages, tools=TOOLS) as stream:
        said = stream.get_final_message()
    messages.append({"role": "assistant", "content": said.content})
    calls = [block for block in said.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(len(str(dict(call.input).get("word", ""))))}
        for call in calls
    ]
    messages.append({"role": "user", "content": results})
sys.stdout.write("".join(block.text for block in said.content if block.type == "text"))
