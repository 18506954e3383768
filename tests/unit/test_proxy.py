"""The proxy: what is said over OpenAI's API is recorded token by token, and nothing sampled is tokenised again."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.fake_engine import END
from support.proxy_sessions import USER, Scripted, message_of, served

from tandem.agents import server
from tandem.agents.server import Proxy, Session
from tandem.envs.agent import Agent
from tandem.errors import ConfigError, EngineError, EnvError
from tandem.rollout.chat import EngineChat
from tandem.rollout.template import Template
from tandem.types import Completion, Message, Sampling, Task

A, B, C, SPACE, BREAK = 64, 65, 66, 220, 198
"""Token ids of letters in the tiny model's tokenizer."""


def test_a_longer_conversation_goes_on_with_the_very_tokens(template: Template) -> None:
    """Bytes that are no UTF-8 cannot be had back from the text; they are in the second prompt all the same."""
    engine = Scripted([200, 130, END], [B, END])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        first = message_of(await post(USER))
        await post(USER, first, {"role": "user", "content": "go on"})
        one, two = session.turns
        whole = (*one.prompt, *one.completion.tokens)
        assert two.prompt[: len(whole)] == whole
        assert two.prompt[len(whole)] != END, "the end token is there already"
        assert Message(role="user", content="go on") in session.messages
        assert two.completion.versions == (4, 4)
        assert [m.role for m in session.messages] == ["user", "assistant", "user", "assistant"]

    served(template, engine, talk)


@pytest.mark.parametrize("first", [[A, END], [A, B]], ids=["ended", "cut"])
def test_the_record_is_that_of_a_chat(template: Template, first: list[int]) -> None:
    """Prompts are those of ``EngineChat`` playing the same conversation."""
    engine = Scripted(first, [B, END])

    async def talk(post: Any, session: Session, _: Proxy) -> list[tuple[int, ...]]:
        answer = message_of(await post(USER))
        await post(USER, answer, {"role": "user", "content": "go on"})
        return [turn.prompt for turn in session.turns]

    async def chat() -> list[tuple[int, ...]]:
        task = Task(id="t", env="e", prompt=(Message(role="user", content="hello"),), answer="")
        chat = EngineChat(Scripted(first, [B, END]), template, task, Sampling(max_tokens=8), "s")  # type: ignore[arg-type]
        await chat.reply()
        chat.add(Message(role="user", content="go on"))
        await chat.reply()
        return [turn.prompt for turn in chat.turns]

    assert served(template, engine, talk) == asyncio.run(chat())


def test_what_extends_nothing_is_a_conversation_of_its_own(template: Template) -> None:
    engine = Scripted([A, END], [B, END], [C, END])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        first = message_of(await post(USER))
        await post({"role": "user", "content": "another"})
        await post(USER, first, {"role": "user", "content": "go on"})
        one, other, whole = session.turns
        assert other.prompt[: len(one.prompt)] != one.prompt
        assert whole.prompt[: len(one.prompt) + 2] == (*one.prompt, A, END)

    served(template, engine, talk)


def test_several_answers_have_streams_of_their_own(template: Template) -> None:
    engine = Scripted([A, END], [B, END])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        answer = await post(USER, n=2)
        assert [c["message"]["content"] for c in answer["choices"]] == ["a", "b"]
        assert answer["usage"]["completion_tokens"] == 4
        assert len(session.turns) == 2
        assert len({key for _, _, key in engine.requests}) == 2
        await post(USER, answer["choices"][1]["message"], {"role": "user", "content": "b it is"})
        assert session.turns[1].completion.tokens == (B, END)
        assert session.turns[2].prompt[: len(session.turns[1].prompt) + 1][-1] == B

    served(template, engine, talk)


def test_requests_say_how_to_sample(template: Template) -> None:
    engine = Scripted([A, B])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        answer = await post(USER)
        assert answer["choices"][0]["finish_reason"] == "length"
        await post(USER, temperature=0.5, max_completion_tokens=3, stop="x")
        assert engine.requests[0][1] == Sampling(max_tokens=8, temperature=0.7)
        assert engine.requests[1][1] == Sampling(max_tokens=3, temperature=0.5, stop=("x",))
        assert [turn.temperature for turn in session.turns] == [0.7, 0.5]

    served(template, engine, talk, temperature=0.7)


def test_logprobs_are_told_of_each_sampled_token(template: Template) -> None:
    async def talk(post: Any, session: Session, _: Proxy) -> None:
        assert (await post(USER))["choices"][0]["logprobs"] is None
        content = (await post(USER, logprobs=True, top_logprobs=0))["choices"][0]["logprobs"]["content"]
        assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in content[:2]] == [
            ("a", -0.5, [97]),
            ("b", -0.5, [98]),
        ]
        assert len(content) == 3, "the end token was sampled too"
        events = (await post(USER, logprobs=True, stream=True)).split("\n\n")
        assert json.loads(events[0].removeprefix("data: "))["choices"][0]["logprobs"] == {"content": content}

    served(template, Scripted([A, B, END]), talk)


def test_a_stream_has_the_whole_answer(template: Template) -> None:
    async def talk(post: Any, session: Session, _: Proxy) -> str:
        text: str = await post(USER, stream=True)
        return text

    events = [line.removeprefix("data: ") for line in served(template, Scripted([A, END]), talk).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    (choice,) = (json.loads(event)["choices"][0] for event in events[:-1])
    assert choice["delta"]["content"] == "a"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
        ({"messages": 5}, None),
    ],
)
def test_what_cannot_be_obeyed_is_refused(template: Template, body: dict[str, Any], param: str | None) -> None:
    engine = Scripted([A, END])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        answer = await post(USER, status=400, **body)
        assert answer["error"]["param"] == param
        assert answer["error"]["type"] == "invalid_request_error"
        assert not engine.requests

    served(template, engine, talk)


def test_an_engine_that_fails_is_the_servers_fault(template: Template) -> None:
    class Broken(Scripted):
        async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
            raise EngineError("it broke")

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        assert (await post(USER, status=502))["error"]["message"] == "it broke"
        assert not session.turns

    served(template, Broken([1]), talk)


@pytest.mark.parametrize("chat", [True, False])
def test_an_engine_that_fails_at_one_of_several_answers_has_failed(template: Template, chat: bool) -> None:
    class Late(Scripted):
        async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
            completion = await super().generate(prompt, sampling, key)
            if len(self.requests) == 1:
                raise EngineError("it broke")
            await asyncio.sleep(0.05)
            return completion

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        await (post(USER, status=502, n=2) if chat else post(status=502, path="v1/completions", n=2, prompt="x"))
        await asyncio.sleep(0.2)  # in which the other would be answered, for nobody
        assert isinstance(session.failure, EngineError)
        assert not session.turns

    served(template, Late([A, END]), talk)


@pytest.mark.parametrize("key", ["", "x" * 32, "sessions", "OTHER"])
def test_a_server_answers_nobody_without_the_key_of_an_episode(template: Template, key: str) -> None:
    """Nothing lists the keys, and that of an episode on another port opens nothing here."""
    engine: Any = Scripted([A, END])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        other = Proxy(session, model="m").key
        wrong = f"{post.url}/{other if key == 'OTHER' else key}/v1"
        headers = {"Authorization": f"Bearer {post.name}"}
        for path in ("chat/completions", "completions"):
            async with post.http.post(f"{wrong}/{path}", json={"messages": [USER]}, headers=headers) as response:
                assert response.status in (401, 404)
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        for path in ("sessions", "v1/models", f"{key}/v1/models", "health", post.name, f"{post.name}/nodes"):
            async with post.http.get(f"{post.url}/{path}") as response:
                assert response.status in (401, 404)
                assert post.name not in await response.text()
        async with post.http.post(f"{post.url}/sessions/create") as response:
            assert response.status in (401, 404)
        async with post.http.get(f"{post.url}/{post.name}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "m"
        assert not session.turns
        assert not engine.requests

    served(template, engine, talk)


def test_a_long_request_does_not_hold_the_event_loop(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long is read and tokenised in a thread, and what is short where it comes in."""
    threads: list[bool] = []
    whole = Template.prompt

    def prompt(*args: Any) -> list[int]:
        threads.append(threading.current_thread() is not threading.main_thread())
        return whole(*args)[-20:]

    monkeypatch.setattr(Template, "prompt", prompt)

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        await post(USER)
        await post({"role": "user", "content": "x " * server.INLINE_BYTES})
        await post(*[USER] * 1000)
        assert threads == [False, True, True]

    served(template, Scripted([A, END]), talk)


# Agents as environments


async def ask(task: Task, url: str) -> str:
    """An agent: two turns, then what it makes of them."""
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": task.prompt[0].content}]
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(f"{url}/chat/completions", json={"messages": messages}) as response:
                messages += [message_of(await response.json()), {"role": "user", "content": "go on"}]
    return f"the answer to {task.answer}"


async def silent(task: Task, url: str) -> None:
    """An agent that does nothing."""


async def impatient(task: Task, url: str) -> None:
    """An agent with a deadline of its own."""
    raise TimeoutError("its own deadline")


def blocking(task: Task, url: str) -> str:
    """An agent that would wait for the policy in the thread that serves it."""
    raise AssertionError("it must not be called")


class Patient:
    """An agent that is called."""

    async def __call__(self, task: Task, url: str) -> str:
        return await ask(task, url)


by_object, by_wrapper = Patient(), functools.wraps(ask)(lambda task, url: ask(task, url))


COMMAND = f"""{sys.executable} -c "
import json, os, sys, urllib.request
task = json.load(sys.stdin)
if task['meta'].get('fail'):
    sys.exit('it cannot')
body = json.dumps({{'messages': task['messages']}}).encode()
request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body)
print(json.load(urllib.request.urlopen(request))['choices'][0]['message']['content'] + '!')
" """


def played(template: Template, agent: str, seconds: float = 30.0, **meta: Any) -> tuple[Any, Mapping[str, float]]:
    task = Task(id="t", env="agent", prompt=(Message(role="user", content="hello"),), answer="7", meta=meta)

    async def go() -> tuple[Any, Mapping[str, float]]:
        chat = EngineChat(Scripted([A, END], [B, END]), template, task, Sampling(max_tokens=8), "s")  # type: ignore[arg-type]
        return chat, await Agent(path="x.jsonl", agent=agent, timeout_seconds=seconds).play(task, chat)

    return asyncio.run(go())


def test_a_function_is_an_environment(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_agent", sys.modules[__name__])
    chat, metrics = played(template, "my_agent:ask")
    assert metrics == {"turns": 2.0}
    one, two = chat.turns
    whole = (*one.prompt, *one.completion.tokens)
    assert two.prompt[: len(whole)] == whole
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "user", "assistant", "assistant"]
    assert chat.messages[-1].content == "the answer to 7"


@pytest.mark.slow
def test_agents_that_fail_say_how(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_agent", sys.modules[__name__])
    for agent, seconds, message in (
        ("my_agent:silent", 30.0, "never asked the policy"),
        ("my_agent:nothing", 30.0, "cannot be imported"),
        (COMMAND, 30.0, "ended with status 1: it cannot"),
        ("sleep 30", 0.2, "took longer than 0.2 s"),
    ):
        with pytest.raises(EnvError, match=message):
            played(template, agent, seconds, fail=True)
    with pytest.raises(TimeoutError, match="its own deadline"):
        played(template, "my_agent:impatient")
    with pytest.raises(ConfigError, match="agent must be"):
        Agent(path="x.jsonl", agent=" ")
    with pytest.raises(ConfigError, match=r"agent must be .*: No closing quotation"):
        Agent(path="x.jsonl", agent="python 'my agent.py")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("my_agent:nothing", "my_agent:nothing' cannot be imported.*pkg.module:function"),
        ("no_such_module:solve", "No module named 'no_such_module'"),
        ("my_agent:COMMAND", "my_agent:COMMAND' is a str, expected a function"),
        ("my_agent:blocking", "my_agent:blocking' is not async; write it with async def"),
        ("no-such-command --fast", "there is no command 'no-such-command'"),
    ],
)
def test_an_agent_that_is_not_there_is_told_before_anything_is_played(
    agent: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_agent", sys.modules[__name__])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(40)))
    with pytest.raises(EnvError, match=message):
        Agent(path=str(rows), agent=agent, prompt="{question}").tasks("train")
    for good in ("my_agent:ask", "my_agent:by_object", "my_agent:by_wrapper", "sh -c true"):
        assert Agent(path=str(rows), agent=good, prompt="{question}").tasks("train")
