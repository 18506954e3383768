"""The proxy with tools and with plain completions: called, recorded and continued token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import END
from support.proxy_sessions import USER, Scripted, message_of, served

from tandem.agents.server import Proxy, Session
from tandem.agents.tool_calls import BareCalls, Tagged
from tandem.rollout.template import Template
from tandem.types import Message

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
OFFER = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n{% endif %}'
)
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = (
    OFFER
    + "{% for m in messages %}"
    + TURN
    + '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
    + '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    + ASK
)
LLAMA = (
    "{% if tools %}<|im_start|>user\n{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    '{% endif %}<|im_start|>assistant\n{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>\n{% else %}" + TURN + "<|im_end|>\n{% endif %}"
    "{% endfor %}" + ASK
)
OTHER = (
    OFFER + "{% for m in messages %}" + TURN + "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
_ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
ADD = {"type": "function", "function": _ADD}
RESULT = {"role": "tool", "content": "3"}


class Roomy(Scripted):
    context = 4000


def template_of(tiny_model: Path, text: str) -> Template:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = text
    return Template(tokenizer, {})


@pytest.fixture
def hermes(tiny_model: Path) -> Template:
    return template_of(tiny_model, HERMES)


def sampled(template: Template, *texts: str) -> Roomy:
    """An engine that samples these texts, each with an end token."""
    return Roomy(*([*template.more(text), END] for text in texts))


def talked(template: Template, engine: Any, talk: Callable[[Any, Session], Coroutine[Any, Any, None]]) -> None:
    """``served`` with room for tools."""

    async def go(post: Any, session: Session, _: Proxy) -> None:
        await talk(post, session)

    served(template, engine, go, max_tokens=512)


def is_continued(session: Session, first: int = 0, then: int = 1) -> bool:
    one, two = session.turns[first], session.turns[then]
    whole = (*one.prompt, *one.completion.tokens)
    return two.prompt[: len(whole)] == whole and two.prompt[len(whole)] != END


CALLS = 'so:  <tool_call> {"name":"add" ,"arguments":{"b":2,"a":1}}\n</tool_call>'
"""As a policy may write it: no chat template would."""


def test_calls_are_read_and_the_next_request_goes_on_with_their_tokens(hermes: Template) -> None:
    engine = sampled(hermes, CALLS, "three")

    async def talk(post: Any, session: Session) -> None:
        answer = await post(USER, tools=[ADD])
        message = message_of(answer)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] == "so:"
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        # The agent writes the arguments anew, calls the call otherwise, and strips: it is the same conversation.
        call |= {"id": "mine", "function": {"name": "add", "arguments": '{ "a": 1, "b": 2 }'}}
        await post(USER, message, {**RESULT, "tool_call_id": "mine"}, tools=[ADD])
        assert is_continued(session)
        assert [m for m in session.messages if m.role == "tool"] == [Message(role="tool", content="3")]
        assert [type(m) for m in session.messages] == [Message] * 4
        assert session.messages[1].content == CALLS

    talked(hermes, engine, talk)
    prompt = hermes.decode(engine.requests[0][0])
    assert '"name": "add"' in prompt


@pytest.mark.parametrize(
    "change",
    [
        {"content": "but:"},
        {"tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a": 1, "b": 3}'}}]},
        {"tool_calls": None},
    ],
    ids=["text", "arguments", "none"],
)
def test_what_the_policy_did_not_say_is_rendered(hermes: Template, change: dict[str, Any]) -> None:
    engine = sampled(hermes, CALLS, "three")

    async def talk(post: Any, session: Session) -> None:
        message = message_of(await post(USER, tools=[ADD]))
        await post(USER, {**message, **change}, {**RESULT, "tool_call_id": "x"}, tools=[ADD])
        assert not is_continued(session)

    talked(hermes, engine, talk)


def test_several_calls_and_one_alone(hermes: Template) -> None:
    two = '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "b", "arguments": {}}</tool_call>'

    async def talk(post: Any, session: Session) -> None:
        message = message_of(await post(USER, tools=[ADD]))
        assert message["content"] is None
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "b"]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert engine.requests[0][1].stop == ()
        # With one alone sampling ends at its end; what this engine samples all the same is no call.
        message = message_of(await post(USER, tools=[ADD], parallel_tool_calls=False))
        assert engine.requests[1][1].stop == ("</tool_call>",)
        assert message["content"] == two
        assert "tool_calls" not in message

    engine = sampled(hermes, two)
    talked(hermes, engine, talk)


def test_a_stream_has_calls_and_counts(hermes: Template) -> None:
    async def talk(post: Any, session: Session) -> None:
        text = await post(USER, tools=[ADD], stream=True, stream_options={"include_usage": True})
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        chunk, counts = map(json.loads, events)
        (call,) = chunk["choices"][0]["delta"]["tool_calls"]
        assert (call["index"], call["function"]["name"]) == (0, "add")
        assert chunk["choices"][0]["finish_reason"] == "tool_calls"
        assert counts["choices"] == []
        assert counts["usage"]["completion_tokens"] == len(session.turns[0].completion.tokens)

    talked(hermes, sampled(hermes, CALLS), talk)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools", "each of tools must be"),
        ({"functions": [{"name": "add"}]}, "functions", "cannot be obeyed"),
    ],
)
def test_what_cannot_be_promised_is_refused(hermes: Template, body: Any, param: str, reason: str) -> None:
    engine = sampled(hermes, "x")

    async def talk(post: Any, session: Session) -> None:
        error = (await post(USER, status=400, **{"tools": [ADD], **body}))["error"]
        assert error["param"] == param
        assert reason in error["message"]
        assert not engine.requests

    talked(hermes, engine, talk)


def test_a_template_without_tools_refuses_them(tiny_model: Path) -> None:
    from conftest import CHAT_TEMPLATE

    template = template_of(tiny_model, CHAT_TEMPLATE)

    async def talk(post: Any, session: Session) -> None:
        error = (await post(USER, tools=[ADD], status=400))["error"]
        assert "chat template writes none" in error["message"]
        assert message_of(await post(USER, tools=[ADD], tool_choice="none"))["content"] == "x"

    talked(template, sampled(template, "x"), talk)


def test_the_template_says_how_calls_are_written(tiny_model: Path) -> None:
    forms = [template_of(tiny_model, text).speech.form for text in (HERMES, LLAMA, OTHER)]
    assert [type(form) for form in forms] == [Tagged, BareCalls, type(None)]
    assert template_of(tiny_model, OTHER).speech.shown


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call> <tool_call>no</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
        "<think>I could <tool_call>{}</tool_call></think> but I know",
        f"<tool_call>{'[' * 9_999}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>',  # half a character of UTF-16
    ],
)
def test_calls_that_cannot_be_read_are_text(text: str) -> None:
    assert Tagged().read(text, {"add"}) == (text, ())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', ["a", "b"]),
        ('{"name": "a", "parameters": {}} and so on', []),
        ('{"name": "c", "parameters": {}}', []),
        ('{"name": "a"}', []),
        ("[" * 9_999, []),
        ("", []),
    ],
)
def test_bare_calls(text: str, names: Sequence[str]) -> None:
    rest, calls = BareCalls().read(text, {"a", "b"})
    assert [call.name for call in calls] == names
    assert rest == ("" if names else text)


# Completions


def test_a_text_begins_as_the_tokenizer_begins_all_texts_and_never_twice(tiny_model: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    template = template_of(tiny_model, HERMES)
    tokenizer = template._tokenizer
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert template.text("ab") == [start, 64, 65]
    assert template.text("<|im_start|>ab") == [start, 64, 65]
    assert template.more("ab") == [64, 65]


def test_stop_texts_are_recorded_and_not_told(hermes: Template) -> None:
    engine = Roomy(*[hermes.more("think\nSee:")] * 2)

    async def talk(post: Any, session: Session) -> None:
        answer = await post(path="v1/completions", prompt="Q\n", stop=["See:"])
        assert answer["choices"][0]["text"] == "think\n"
        assert session.turns[0].completion.tokens == tuple(hermes.more("think\nSee:"))
        assert message_of(await post(USER, stop="See:"))["content"] == "think\n"

    talked(hermes, engine, talk)


def test_completions_of_many(hermes: Template) -> None:
    engine = Roomy([64, END], [65, END], [66, END], [67, END])

    async def talk(post: Any, session: Session) -> None:
        answer = await post(path="v1/completions", prompt=["x", "yy"], n=2, logprobs=0)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == ["a", "b", "c", "d"]
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["a", "<|im_end|>"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": None,
            "text_offset": [0, 1],
        }
        assert answer["usage"]["prompt_tokens"] == 3
        await post(path="v1/completions", prompt=[1, 2, 3])
        assert session.turns[-1].prompt == (1, 2, 3)
        await post(path="v1/completions", prompt=[[1], [2, 3]])
        assert [turn.prompt for turn in session.turns[-2:]] == [(1,), (2, 3)]
        events = (await post(path="v1/completions", prompt="x", stream=True)).split("\n\n")
        chunk = json.loads(events[0].removeprefix("data: "))
        assert chunk["object"] == "text_completion"
        assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("d", "stop")

    talked(hermes, engine, talk)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [True]]}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({}, None),
    ],
)
def test_completions_that_cannot_be_had_are_refused(hermes: Template, body: Any, param: str | None) -> None:
    engine = sampled(hermes, "x")

    async def talk(post: Any, session: Session) -> None:
        error = (await post(path="v1/completions", status=400, **body))["error"]
        assert error["param"] == param
        assert not engine.requests

    talked(hermes, engine, talk)
