"""The judge against a server that answers, errs, is slow or is not there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from tandem.errors import ConfigError, RewardError
from tandem.metrics import flatten
from tandem.rewards.grading.workers import Graders
from tandem.rewards.judge import Judge
from tandem.rewards.number import Number
from tandem.rollout.gold import gold_rollout
from tandem.types import Message, Rollout, Task

pytestmark = pytest.mark.slow


class FakeServer:
    """Answers with the score that the reply names, after what ``script`` says of the same question's first tries."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.script: Callable[[str, int], web.StreamResponse | str | None] = lambda reply, times: None
        self.url = ""
        self.most = self.under_way = 0
        self.full = 0
        """Answers wait until this many questions are there."""
        self._full = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> Any:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        question = body["messages"][-1]["content"]
        times = sum(one["messages"][-1]["content"] == question for one in self.requests)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.under_way >= self.full:
                self._full.set()
            await self._full.wait()
            reply = re.search(r"\[Reply\]\n(.*)\n", question)
            response = self.script(reply[1] if reply else question, times)
            if response == "hang":
                await asyncio.Event().wait()
            if isinstance(response, web.StreamResponse):
                return response
            return completion(response if response is not None else f"Fine.\nScore: {reply[1] if reply else 5}")
        finally:
            self.under_way -= 1


def completion(text: str | None, **more: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}, **more}]})


def group(*replies: str, **meta: Any) -> list[Rollout]:
    task = Task(id="t", env="e", prompt=(Message(role="user", content="What is 3 + 4?"),), answer="7", meta=meta)
    return [replace(gold_rollout(task, reply), id=f"t@0/{i}") for i, reply in enumerate(replies)]


def judged(rollouts: list[Rollout], server: FakeServer, **options: Any) -> tuple[list[Rollout], dict[str, float]]:
    """Graded through a real grading process."""

    async def go() -> tuple[list[Rollout], dict[str, float]]:
        async with server.serving():
            judge = Judge(**{"url": server.url, "model": "grader", **options})
            async with Graders({"judge": (judge, 1.0), "number": (Number(), 0.0)}) as graders:
                return await graders.grade(rollouts), flatten(graders.metrics())

    return asyncio.run(go())


def says(text: str | None) -> Callable[[str, int], Any]:
    return lambda reply, times: text


# what is asked and read


def test_scores_are_scaled_and_equal_replies_asked_about_once() -> None:
    server = FakeServer()
    got, _ = judged(group("7", "3", "7", "10", "7"), server)
    assert [rollout.reward for rollout in got] == pytest.approx([0.7, 0.3, 0.7, 1.0, 0.7])
    assert len(server.requests) == 3


def test_the_request() -> None:
    server = FakeServer()
    options = {"request": {"seed": 3, "top_p": 0.5}, "max_tokens": 77}
    judged(group("7"), server, **options)
    (request,) = server.requests
    question = request.pop("messages")
    assert request == {"model": "grader", "temperature": 0, "max_tokens": 77, "seed": 3, "top_p": 0.5}
    assert "[Question]\nWhat is 3 + 4?\n" in question[0]["content"]
    assert "[Reference answer, if there is one]\n7\n" in question[0]["content"]
    assert "from 0 (wrong or useless) to 10 (right" in question[0]["content"]
    assert "Authorization" not in server.headers[0]


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    server = FakeServer()
    judged(group("7"), server, key_variable="JUDGE_KEY")
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RewardError, match="reward judge: key_variable: JUDGE_KEY is not set in the environment"):
        judged(group("7"), server, key_variable="JUDGE_KEY")


def test_a_conversation_is_shown_with_its_roles() -> None:
    server = FakeServer()
    server.script = says("5")
    prompt = (Message(role="system", content="Count."), Message(role="user", content="One."))
    spoken = (
        Message(role="assistant", content="Two."),
        Message(role="user", content="Three."),
        Message(role="assistant", content="Four."),
    )
    task = Task(id="t", env="e", prompt=prompt, answer="")
    rollout = replace(gold_rollout(task, ""), messages=(*prompt, *spoken))
    judged([rollout], server, template="{prompt}>{reply}")
    assert server.requests[0]["messages"][0]["content"] == (
        "system: Count.\n\nuser: One.\n\nassistant: Two.\n\nuser: Three.>Four."
    )


def test_scores_are_found() -> None:
    texts = {
        "7": 7.0,
        " 8.5\n": 8.5,
        "7/10": 7.0,
        "Good.\nScore: 7": 7.0,
        "**Score:** 7 / 10.": 7.0,
        "Score: 3\nOn reflection:\nscore: 4": 4.0,
        "# Score\n10": 10.0,
        "Score = 0": 0.0,
        "1. It is right\n2. It is brief\nScore: 9": 9.0,
    }
    replies = {f"reply {i}": text for i, text in enumerate(texts)}
    server = FakeServer()
    server.script = lambda reply, times: replies[reply]
    got, _ = judged(group(*replies), server)
    scores = {text: rollout.reward for text, rollout in zip(texts, got, strict=True)}
    assert scores == pytest.approx({text: score / 10 for text, score in texts.items()})


def test_an_answer_without_a_score_costs_its_rollout() -> None:
    texts = {
        "I cannot say. 7 of them are fine.": "found no score in the judge's answer ...'I cannot say. 7 of them",
        "Score: 12": "was given 12, expected 0 to 10",
        "Score: -1": "was given -1, expected 0 to 10",
    }
    replies = {f"reply {i}": text for i, text in enumerate(texts)}
    server = FakeServer()
    server.script = lambda reply, times: replies.get(reply)
    got, metrics = judged(group("5", *replies), server)
    assert [rollout.reward for rollout in got] == [0.5, None, None, None]
    assert [rollout.status for rollout in got[1:]] == ["error"] * 3
    for rollout, error in zip(got[1:], texts.values(), strict=True):
        assert error in rollout.error
    assert metrics["grading/failed_bad_value"] == 3.0


# siblings


def relative(scores: dict[str, str]) -> Callable[[str, int], Any]:
    """Scores each reply of the question in the order in which it stands there."""

    def script(question: str, times: int) -> Any:
        replies = re.findall(r"\[Reply (\d+)\]\n(\w+)", question)
        text = "\n".join(f"Reply {number}: {scores[reply]}" for number, reply in replies)
        usage = {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40}
        return web.json_response({"choices": [{"message": {"content": f"Well.\n{text}"}}], "usage": usage})

    return script


def test_siblings_are_scored_against_each_other_by_a_rubric_and_without_an_answer() -> None:
    server = FakeServer()
    server.script = relative({"a": "9", "b": "2", "c": "5.5"})
    got, _ = judged(group("a", "b", "a", "c"), server, relative=True, rubric=["It is right.", "It is brief."])
    assert [rollout.reward for rollout in got] == pytest.approx([0.9, 0.2, 0.9, 0.55])
    (request,) = server.requests
    question = request["messages"][0]["content"]
    assert question.count("[Reply ") == 3
    assert "\n[Criteria]\n1. It is right.\n2. It is brief.\n" in question
    assert [rollout.metrics for rollout in got] == [{"judge/tokens": 10.0}] * 4


def test_disagreement_is_the_share_of_replies_that_a_second_look_scores_otherwise() -> None:
    server = FakeServer()
    looks: list[str] = []

    def script(question: str, times: int) -> Any:
        looks.append(question)
        first = re.findall(r"\[Reply 1\]\n(\w+)", question)[0]
        return relative({"a": "6", "b": "9" if first == "b" else "2"})(question, times)

    server.script = script
    got, _ = judged(group("a", "b"), server, relative=True, samples=2)
    assert len(set(looks)) == 2  # in another order each
    assert [rollout.metrics["judge/disagreement"] for rollout in got] == [0.0, 1.0]
    assert [rollout.reward for rollout in got] == pytest.approx([0.6, 0.55])


def test_a_sibling_without_a_score_is_lost_alone() -> None:
    server = FakeServer()
    server.script = says("Reply 1: 5\nReply 3: 8")
    got, _ = judged(group("a", "b", "c"), server, relative=True)
    assert [rollout.reward for rollout in got] == [0.5, None, 0.8]
    assert "found no score" in got[1].error


def test_what_was_said_is_remembered() -> None:
    server = FakeServer()

    async def go() -> list[float | None]:
        async with server.serving():
            judge = Judge(url=server.url, model="grader")
            async with Graders({"judge": (judge, 1.0)}) as graders:
                return [rollout.reward for _ in range(2) for rollout in await graders.grade(group("7", "3"))]

    assert asyncio.run(go()) == [0.7, 0.3, 0.7, 0.3]
    assert len(server.requests) == 2


# how many at once


@pytest.mark.parametrize(("concurrency", "full"), [(1, 1), (3, 3), (8, 6)])
def test_so_many_questions_reach_the_server_at_once(concurrency: int, full: int) -> None:
    server = FakeServer()
    server.full = full  # nobody is answered before that many wait
    got, _ = judged(group("1", "2", "3", "4", "5", "6"), server, concurrency=concurrency)
    assert [rollout.reward for rollout in got] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert full <= server.most <= concurrency


# away


def status(code: int, times: int, **headers: str) -> Callable[[str, int], Any]:
    """That status the first few times that a question is asked."""
    return lambda reply, attempt: web.Response(status=code, headers=headers) if attempt <= times else None


def test_busy_servers_are_asked_again() -> None:
    codes = {"2": 408, "3": 429, "4": 500, "5": 502, "6": 503, "7": 529}
    server = FakeServer()
    server.script = lambda reply, attempt: status(codes[reply], 2)(reply, attempt)
    got, _ = judged(group(*codes), server)
    assert [rollout.reward for rollout in got] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert len(server.requests) == 18


def test_a_server_that_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    server.script = lambda reply, attempt: web.Response(status=503) if reply == "x" else None
    got, metrics = judged(group("5", "x"), server, retries=2)
    assert [(rollout.status, rollout.reward) for rollout in got] == [("ok", 0.5), ("error", None)]
    assert got[1].rewards == {"number": 0.0}
    assert metrics["grading/failed_away"] == 1.0
    assert f"reward 'judge' had no answer from {server.url}/chat/completions: it said 503, asked 3 times" in caplog.text
    assert len(server.requests) == 4


def test_the_deadline_holds_for_all_questions_of_a_group_together() -> None:
    server = FakeServer()
    server.script = lambda reply, attempt: "hang" if reply != "5" else None
    got, metrics = judged(group("5", "x", "y"), server, deadline_seconds=0.7)
    assert [rollout.status for rollout in got] == ["ok", "error", "error"]
    assert got[0].reward == 0.5
    assert metrics["grading/failed_away"] == 2.0
    assert "grading/restarts" not in metrics


@pytest.mark.parametrize("code", [401, 403, 404])
def test_what_would_never_be_answered_ends_the_run(code: int) -> None:
    server = FakeServer()
    server.script = lambda reply, attempt: web.Response(status=code, text='{"error": "no such model"}')
    with pytest.raises(RewardError, match=rf"was refused by http.*: {code} .*no such model"):
        judged(group("7", "8"), server)
    assert len(server.requests) == 2


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "url must begin with http"),
        ({"template": "{prompt}"}, "template must have {reply} in it"),
        ({"pattern": "("}, "pattern '(' is no regular expression"),
        ({"pattern": r"\d"}, r"pattern '\\d' must have 1 groups"),
        ({"relative": True, "pattern": r"(\d)"}, "must have 2 groups, the last around the score"),
        ({"rubric": ["x"], "template": "{reply}"}, "template must have {rubric} in it"),
        ({"lowest": 10.0}, "highest must be above lowest (10), got 10"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0"),
        ({"deadline_seconds": float("inf")}, "deadline_seconds must be above 0"),
        ({"retries": -1}, "retries must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Judge(**{"url": "http://x/v1", "model": "m", **options})
    assert message in str(caught.value)
