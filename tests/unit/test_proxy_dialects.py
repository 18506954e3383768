"""OpenAI's responses and Anthropic's messages, by the JSON of their documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import END
from support.proxy_sessions import Scripted, served

from tandem.agents.server import Proxy, Session
from tandem.rollout.template import Template
from tandem.types import Message

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = 'so:<tool_call>{"name":"add" ,"arguments":{"a":1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": "1 + 2?"}


class Roomy(Scripted):
    context = 4000


@pytest.fixture
def template(tiny_model: Path) -> Template:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    return Template(tokenizer, {})


Ask = Callable[..., Coroutine[Any, Any, Any]]


def talked(template: Template, talk: Callable[[Ask, Session], Coroutine[Any, Any, None]], *texts: str) -> None:
    """Have ``talk`` ask a session whose policy says these texts."""

    async def go(post: Any, session: Session, _: Proxy) -> None:
        async def ask(path: str, status: int = 200, **body: Any) -> Any:
            async with post.http.post(f"{post.url}/{post.name}/v1/{path}", json={"model": "m", **body}) as response:
                text = await response.text()
                assert response.status == status, text
                return text if body.get("stream") else json.loads(text)

        await talk(ask, session)

    served(template, Roomy(*([*template.more(text), END] for text in texts)), go, max_tokens=200)


def is_continued(session: Session) -> bool:
    one, two = session.turns[-2:]
    whole = (*one.prompt, *one.completion.tokens)
    return two.prompt[: len(whole)] == whole


RESPONSES_TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": False}
MESSAGES_TOOL = {"name": "add", "description": "Add.", "input_schema": SCHEMA}


def test_a_response_calls_and_goes_on_with_the_very_tokens(template: Template) -> None:
    async def talk(ask: Ask, session: Session) -> None:
        begin = {"instructions": "Be brief.", "tools": [RESPONSES_TOOL], "max_output_tokens": 100, "store": False}
        first = await ask(
            "responses", input=[{"role": "user", "content": [{"type": "input_text", "text": "1?"}]}], **begin
        )
        assert (first["object"], first["status"], first["usage"]["output_tokens"]) == ("response", "completed", 62)
        message, call = first["output"]
        assert message["content"][0]["text"] == "so:"
        assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1})
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        again = [{"role": "user", "content": "1?"}, {"type": "reasoning", "summary": []}, message, call, result]
        second = await ask("responses", input=again, **begin)
        assert second["output"][0]["content"][0]["text"] == "three"
        assert is_continued(session)
        assert [m for m in session.messages if m.role == "tool"] == [Message(role="tool", content="3")]
        third = await ask("responses", input="More.", previous_response_id=second["id"], **begin)
        assert third["output"][0]["content"][0]["text"] == "four"
        assert is_continued(session)
        assert [m.role for m in session.messages] == [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
            "assistant",
        ]

    talked(template, talk, CALLS, "three", "four")


def test_messages_call_and_go_on_with_the_very_tokens(template: Template) -> None:
    async def talk(ask: Ask, session: Session) -> None:
        begin = {"system": [{"type": "text", "text": "Be brief."}], "tools": [MESSAGES_TOOL], "max_tokens": 100}
        first = await ask("messages", messages=[USER], tool_choice={"type": "auto"}, **begin)
        assert (first["type"], first["role"], first["stop_reason"]) == ("message", "assistant", "tool_use")
        text, call = first["content"]
        assert text == {"type": "text", "text": "so:"}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]},
            {"type": "text", "text": "Go on."},
        ]
        again = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
        second = await ask("messages", messages=again, **begin)
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "three"}], "end_turn")
        assert is_continued(session)
        assert [m.role for m in session.messages[-3:]] == ["tool", "user", "assistant"]
        cut = await ask("messages", messages=[USER], max_tokens=2)
        assert cut["stop_reason"] == "end_turn"

    talked(template, talk, CALLS, "three", "")


def events(stream: str) -> list[dict[str, Any]]:
    """Data of server-sent events, each under the name that its type says."""
    pairs = [event.split("\n", 1) for event in stream.strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in pairs]
    assert [head for head, _ in pairs] == [f"event: {event['type']}" for event in data]
    return data


def test_streams_have_the_events_of_their_documentation(template: Template) -> None:
    async def talk(ask: Ask, _: Session) -> None:
        stream = events(await ask("responses", input="?", tools=[RESPONSES_TOOL], stream=True))
        assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
        assert [event["type"].removeprefix("response.") for event in stream] == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "output_item.added",
            "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert stream[4]["delta"] == "so:"
        assert stream[-1]["response"]["output"][1]["arguments"] == '{"a": 1}'
        stream = events(await ask("messages", messages=[USER], max_tokens=99, tools=[MESSAGES_TOOL], stream=True))
        assert [event["type"] for event in stream] == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop",
            "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert stream[2]["delta"] == {"type": "text_delta", "text": "so:"}
        assert stream[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
        assert stream[-2]["delta"]["stop_reason"] == "tool_use"

    talked(template, talk, CALLS)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("responses", {"input": [{"type": "web_search_call"}]}, "an item of type web_search_call cannot be read"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ("responses", {"input": "?", "previous_response_id": "resp_1"}, "no response of this episode has this id"),
        ("responses", {"input": "?", "tools": [{"type": "web_search"}]}, "each of tools must be"),
        ("responses", {"input": [1]}, "the body is none of /v1/responses"),
        ("responses", {"input": [{"type": "function_call_output"}]}, "the body is none of /v1/responses"),
        ("messages", {"messages": []}, "messages are empty"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part has the type image"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(path: str, body: dict[str, Any], text: str, template: Template) -> None:
    async def talk(ask: Ask, session: Session) -> None:
        answer = await ask(path, status=400, **body)
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert text in answer["error"]["message"]
        assert session.turns == []

    talked(template, talk, "")


def test_a_response_of_another_episode_is_not_gone_on_with(template: Template) -> None:
    async def go(post: Any, _: Session, proxy: Proxy) -> None:
        first = await post(path="v1/responses", input="?")
        more = await post(path="v1/responses", input="?", previous_response_id=first["id"])
        assert more["object"] == "response"
        odd = await post(path="v1/responses", input="?", previous_response_id="resp_0", status=400)
        assert "no response of this episode has this id" in odd["error"]["message"]

    served(template, Roomy(*([*template.more(text), END] for text in ("one", "two"))), go, max_tokens=200)
