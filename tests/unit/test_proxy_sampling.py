"""The proxy and the objective: what changes the distribution that is sampled is recorded, or is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.fake_engine import END
from support.proxy_sessions import USER, Scripted, message_of, served

from tandem.agents.schema import _tell
from tandem.agents.server import Proxy, Session
from tandem.errors import EngineError
from tandem.observability import waits
from tandem.rollout.chat import EngineChat
from tandem.rollout.template import Template
from tandem.rollout.turns import last_completion
from tandem.types import Completion, Message, Sampling, Task

A, B = 64, 65
"""Token ids of letters in the tiny model's tokenizer."""
TASK = Task(id="t", env="agent", prompt=(Message(role="user", content="hello"),), answer="7")


RUNS = {
    "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": 0.25, "min_tokens": 4,
}  # fmt: skip
"""A run that leaves nothing as it is."""


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/completions"])
@pytest.mark.parametrize(
    ("name", "neutral"),
    [(name, 1.0 if name in ("top_p", "repetition_penalty") else 0) for name in RUNS] + [("top_k", -1), ("top_k", 41)],
)
def test_what_a_turn_does_not_record_stays_the_runs(
    template: Template, name: str, neutral: float, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    _tell.cache_clear()
    engine = Scripted([A, END])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        asking = partial(post, path=path, prompt="hello") if path == "v1/completions" else partial(post, USER)
        for value in (neutral, neutral, RUNS[name]):
            await asking(**{name: value})
        assert [request[1] for request in engine.requests] == [Sampling(max_tokens=8, **RUNS)] * 3  # type: ignore[arg-type]
        assert len(caplog.messages) == 1
        assert f"{name} is left out" in caplog.text
        assert f"the run's is {RUNS[name]:g} (sampling.{name} in the recipe)" in caplog.text

    served(template, engine, talk, **RUNS)


ODD: dict[str, Any] = {
    "seed": 7,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "logit_bias": {"5": 1},
    "top_logprobs": 3,
    "ignore_eos": True,
    "reasoning_effort": "low",
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_obeyed_is_left_out_and_told_once(
    template: Template, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _tell.cache_clear()
    engine = Scripted([A, END])

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        for _ in range(3):
            assert message_of(await post(USER, **{name: ODD[name]}))["content"] == "a"
        assert len(caplog.messages) == 1
        assert name in caplog.text

    served(template, engine, talk)


def test_options_of_the_chat_template_are_obeyed(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not thinks %}b{% endif %}"

    async def talk(post: Any, session: Session, _: Proxy) -> None:
        first = message_of(await post({"role": "user", "content": "a"}))
        await post({"role": "user", "content": "a"}, chat_template_kwargs={"thinks": True})
        assert [turn.prompt for turn in session.turns] == [(A, B), (A,)]
        await post({"role": "user", "content": "a"}, first, {"role": "user", "content": "b"}, thinks=1)
        assert session.turns[2].prompt == (A, B, A, END, B, B)

    served(Template(tokenizer, {}), Scripted([A, END]), talk)


# Whose fault it is


def test_who_is_waited_for_is_the_engine(template: Template) -> None:
    """And an answer is progress of the rollout that the agent plays: a long episode is no silence."""
    seen: list[waits.Wait] = []

    class Slow(Scripted):
        async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
            seen[:] = waits.current()
            return await super().generate(prompt, sampling, key)

    engine: Any = Slow([A, END])

    async def go() -> None:
        chat = EngineChat(engine, template, TASK, Sampling(max_tokens=8), "s")
        async with waits.waiting("rollouts group t", "rollout t", on="environment e") as rollout, chat.serve() as url:
            moved = rollout.moved
            async with aiohttp.ClientSession() as http:
                await http.post(f"{url}/chat/completions", json={"messages": [USER]})
            assert [(one.owner, one.on) for one in waits.chain(rollout, seen)] == [
                ("rollouts group t", "environment e"),
                ("environment e", "engine"),
            ]
            assert rollout.moved > moved
        assert last_completion[engine] > moved

    asyncio.run(go())


@pytest.mark.parametrize("swallows", [True, False], ids=["swallowed", "raised"])
def test_an_engine_that_fails_is_no_fault_of_the_agent(template: Template, swallows: bool) -> None:
    class Broken(Scripted):
        async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
            self.requests.append((tuple(prompt), sampling, key))
            if len(self.requests) in fails:
                raise EngineError("it broke")
            return await super().generate(prompt, sampling, key)

    async def go(engine: Any) -> None:
        chat = EngineChat(engine, template, TASK, Sampling(max_tokens=8), "s")
        async with chat.serve() as url, aiohttp.ClientSession() as http:
            for _ in range(3):
                response = await http.post(f"{url}/chat/completions", json={"messages": [USER]})
            if not swallows:
                raise ValueError(response.status)

    fails = {1}
    if swallows:
        asyncio.run(go(Broken([A, END])))  # asked again, it answers
    else:
        with pytest.raises(ValueError, match="200"):
            asyncio.run(go(Broken([A, END])))
    fails = {1, 2, 3}
    with pytest.raises(EngineError, match="it broke"):
        asyncio.run(go(Broken([A, END])))
