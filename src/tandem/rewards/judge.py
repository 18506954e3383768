"""LLM judge: a score by a language model behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tandem.errors import ConfigError, RewardError, bounded, redacted
from tandem.rewards.base import Failure, GroupReward, Outcome, Verdict
from tandem.together import cancel
from tandem.types import Message, Rollout, column

if TYPE_CHECKING:
    from tandem.http import HttpClient

_PLACE = re.compile(r"\{(\w+(?:\.[^\W\d]\w*)*)\}")

_TEMPLATE = """Grade an assistant's reply.

[Question]
{prompt}

[Reference answer, if there is one]
{answer}

[Reply]
{reply}
{rubric}
[Your task]
How good is the reply, from {lowest} (wrong or useless) to {highest} (right, complete and clear)? Say briefly why, \
then end with a line "Score: N"."""

_PATTERN = r"(?im)^[^\w\n-]*(?:score[^\w\n-]*)?(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?[^\w\n]*$"

_RELATIVE_TEMPLATE = """Compare an assistant's replies to the same question.

[Question]
{prompt}

[Reference answer, if there is one]
{answer}

{reply}
{rubric}
[Your task]
How good is each reply beside the others, from {lowest} (the worst there could be) to {highest} (the best)? \
Replies that differ in quality get different scores. Say briefly why, then end with a line "Reply N: SCORE" for each."""

_RELATIVE_PATTERN = r"(?im)^[^\w\n]*reply (\d+)[^\w\n-]*(-?\d+(?:\.\d+)?)"

_NEVER = (401, 403, 404)
"""Statuses that no other question would change: a wrong key, URL or model."""
_LATER = (408, 429)
"""Statuses below 500 with which the same question may be asked again."""
_MOST_BYTES = 4 << 20
"""Largest answer of a judge."""
_SLACK = 10.0
"""Seconds beyond the deadline after which the judge's process is thought to hang."""
_MOST_ANSWERS = 10_000
"""Answers that a grading process remembers."""
_SAME = 0.1
"""Scores of one reply agree if they are as near as this, of the whole scale."""

_remembered: dict[tuple[str, int], str] = {}


class ReplyQuestion(NamedTuple):
    """A question, and the place of a rollout's reply in it."""

    question: str
    sample: int
    """Which of the times that the reply is judged this is."""
    number: int = 0
    """Of the reply among its siblings, from 1; 0: it is alone in the question."""


class Answer(NamedTuple):
    """What a judge said."""

    text: str
    tokens: int = 0
    """Read and written for it, by the server's own count; 0: it was remembered, or is not counted."""


@dataclass(frozen=True, kw_only=True)
class Judge(GroupReward):
    """The score that a language model gives, scaled to 0 to 1. Equal replies of a group are scored once.

    What a judge said is remembered: each grading process asks a question once. A server that answers 429 or 5xx, or not
    at all, is asked again after a pause that doubles (or that it names).
    """

    full_marks: ClassVar[None] = None

    url: str
    """Base URL of the API, such as http://127.0.0.1:8000/v1; /chat/completions is added."""
    model: str
    """What the server calls the judge."""
    template: str = _TEMPLATE
    """The question; {prompt}, {reply}, {answer}, {lowest}, {highest} and {column} of the task's meta are filled in."""
    relative: bool = False
    """Score the siblings of a group against each other, in one question: {reply} is then all of them, numbered, each
    with all that was said after the task's prompt."""
    rubric: list[str] = field(default_factory=list)
    """Criteria that the judge is to go by, which {rubric} in the template stands for."""
    samples: int = bounded(1, least=1)
    """How often each reply is judged; the mean counts, and judge/disagreement is the share of replies whose scores lie
    further apart than a tenth of the scale. With ``relative`` the siblings stand in another order each time."""
    pattern: str = _PATTERN
    """Regular expression whose first group is the score; its last match counts. As it is: a line with nothing but a
    number, 'Score: 7' or '7/10'. With ``relative`` its groups are a reply's number and the score: 'Reply 2: 7'."""
    lowest: float = 0.0
    """Score that is a reward of 0."""
    highest: float = 10.0
    """Score that is a reward of 1."""
    max_tokens: int = bounded(512, least=1)
    """Most tokens of the judge's answer."""
    request: dict[str, Any] = field(default_factory=dict)
    """More fields of the request, as the server knows them; null takes one out, such as {temperature: null}."""
    key_variable: str = ""
    """Environment variable with the API key; empty: none is sent."""
    concurrency: int = bounded(8, least=1)
    """Questions under way at once, in each of grading.workers processes."""
    timeout_seconds: float = bounded(60.0, above=0)
    """Seconds that one request may take."""
    retries: int = bounded(4)
    """How often a question is asked again."""
    deadline_seconds: float = bounded(300.0, above=0)
    """Seconds that the questions about one group may take, with all that are asked again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if not self.url.startswith(("http://", "https://")):
            problems.append(f"url must begin with http:// or https://, got {self.url!r}")
        if "{reply}" not in self.template:
            problems.append("template must have {reply} in it, or the judge would not see what it judges")
        if not -math.inf < self.lowest < self.highest < math.inf:
            problems.append(f"highest must be above lowest ({self.lowest:g}), got {self.highest:g}")
        if self.rubric and "{rubric}" not in self._texts[0]:
            problems.append("template must have {rubric} in it, or the judge would not see the rubric")
        if problem := _pattern_problem(self._texts[1], 1 + self.relative):
            problems.append(problem)
        if problems:
            raise ConfigError("\n".join(problems))

    def prepare(self) -> None:
        """Look for the key; raises RewardError if it is not there."""
        if self.key_variable and not os.environ.get(self.key_variable):
            raise RewardError(f"reward judge: key_variable: {self.key_variable} is not set in the environment")

    @property
    def _texts(self) -> tuple[str, str]:
        """Template and pattern; those for siblings where the recipe has none of its own."""
        if not self.relative:
            return self.template, self.pattern
        template = _RELATIVE_TEMPLATE if self.template == _TEMPLATE else self.template
        return template, _RELATIVE_PATTERN if self.pattern == _PATTERN else self.pattern

    async def scores(self, rollouts: Sequence[Rollout]) -> Outcome:
        """One verdict per rollout; raises ValueError if the template names what a task does not have."""
        from tandem.http import HttpClient  # loads aiohttp

        questions = self._questions(rollouts)
        gate = asyncio.Semaphore(self.concurrency)
        key = os.environ.get(self.key_variable, "") if self.key_variable else ""
        base = self.url.rstrip("/").removesuffix("/chat/completions")
        client = HttpClient(f"{base}/chat/completions", key, kind="judge", most_bytes=_MOST_BYTES)

        async def ask(question: str, sample: int) -> Answer | Failure:
            body = json.dumps(self._body(question))
            if (known := _remembered.get((base + body, sample))) is not None:
                return Answer(known)
            async with gate:
                answer = await self._ask(client, body)
            if isinstance(answer, Answer):
                _remembered[base + body, sample] = answer.text
                if len(_remembered) > _MOST_ANSWERS:
                    del _remembered[next(iter(_remembered))]
            return answer

        distinct = dict.fromkeys(each[:2] for one in questions for each in one)
        answers = {question: asyncio.ensure_future(ask(*question)) for question in distinct}
        try:
            await asyncio.wait(answers.values(), timeout=self.deadline_seconds)
        finally:
            await cancel(*(task for task in answers.values() if not task.done()))
            await client.close()
        scores = [[self._verdict(answers[each[:2]], each.number) for each in one] for one in questions]
        results = [task.result() for task in answers.values() if not task.cancelled()]
        tokens = sum(answer.tokens for answer in results if isinstance(answer, Answer)) / len(rollouts)
        metrics = [{"judge/tokens": tokens, **_disagreement(one)} for one in scores]
        return Outcome([_mean(one) for one in scores], metrics)

    def _questions(self, rollouts: Sequence[Rollout]) -> list[list[ReplyQuestion]]:
        """What is asked about each rollout."""
        times = range(self.samples)
        if not self.relative:
            questions = [self._question(rollout, *_last_reply(rollout)) for rollout in rollouts]
            return [[ReplyQuestion(question, sample) for sample in times] for question in questions]
        begun = rollouts[0].task.prompt
        replies = [_transcript(rollout.messages[len(begun) :]) for rollout in rollouts]
        distinct, orders = list(dict.fromkeys(replies)), []
        for sample in times:
            first = sample % len(distinct)
            order = distinct[first:] + distinct[:first]
            text = "\n\n".join(f"[Reply {number}]\n{reply}" for number, reply in enumerate(order, 1))
            orders.append((self._question(rollouts[0], _transcript(begun), text), order))
        return [
            [ReplyQuestion(question, sample, order.index(reply) + 1) for sample, (question, order) in enumerate(orders)]
            for reply in replies
        ]

    async def _ask(self, client: HttpClient, question: str) -> Answer | Failure:
        """The judge's words, or why there are none; asks again while the server is away."""
        from tandem.http import HttpError, HttpStatusError, RetryPolicy

        body, headers = question.encode(), {"Content-Type": "application/json"}
        pauses = RetryPolicy()
        why = ""
        for attempt in range(self.retries + 1):
            pause, text = 0.0, ""
            try:
                response = await client.call("POST", "", body, headers, self.timeout_seconds)
                text = response.body.decode(errors="replace")
                parsed = json.loads(text)
                choice, usage = parsed["choices"][0], parsed.get("usage") or {}
                answer = choice["message"]["content"]
            except HttpStatusError as error:
                if error.status < 500 and error.status not in _LATER:
                    refusal = f"was refused by {redacted(client.url)}: {error.status} {error.reason[:200]}"
                    return Failure("raised", refusal, "run" if error.status in _NEVER else "rollout")
                why, pause = f"it said {error.status}", error.retry_after or 0.0
            except HttpError as error:
                why = error.reason
            except (ValueError, LookupError, TypeError):  # such as a proxy's page
                why = f"it said what is no chat completion: {text[:80]!r}"
            else:
                if isinstance(answer, str) and answer.strip():
                    return Answer(answer, int(usage.get("total_tokens") or 0))
                end = f"finish_reason {choice.get('finish_reason')}; max_tokens may be too small"
                return Failure("raised", f"got an answer without text from the judge ({end})")
            if attempt < self.retries:
                await pauses.pause(attempt, pause)
        times = f", asked {self.retries + 1} times" if self.retries else ""
        return Failure("away", f"had no answer from {redacted(client.url)}: {why}{times}")

    @property
    def call_seconds(self) -> float:
        return self.deadline_seconds + _SLACK

    def _question(self, rollout: Rollout, prompt: str, reply: str) -> str:
        rubric = "".join(f"{number}. {criterion}\n" for number, criterion in enumerate(self.rubric, 1))
        fields = {
            **rollout.task.meta,
            "prompt": prompt,
            "reply": reply,
            "rubric": f"\n[Criteria]\n{rubric}" if rubric else "",
            "answer": rollout.task.answer,
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }
        try:
            return _PLACE.sub(lambda place: str(column(fields, place[1])), self._texts[0])
        except KeyError as error:
            missing, has = error.args[0], ", ".join(fields)
            raise ValueError(f"template names {{{missing}}}; task {rollout.task.id} has: {has}") from None

    def _body(self, question: str) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            **self.request,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _verdict(self, task: asyncio.Task[Answer | Failure], number: int) -> float | Failure:
        if task.cancelled():
            return Failure("away", f"had no answer from {redacted(self.url)} within {self.deadline_seconds:g} s")
        answer = task.result()
        if isinstance(answer, Failure):
            return answer
        matches = [match for match in re.finditer(self._texts[1], answer.text) if match[1]]
        if number:
            matches = [match for match in matches if match[1] == str(number)]
        try:
            score = float(matches[-1][2 if number else 1])
        except (IndexError, ValueError):
            return Failure("bad_value", f"found no score in the judge's answer ...{answer.text[-60:]!r}")
        if not self.lowest <= score <= self.highest:
            return Failure("bad_value", f"was given {score:g}, expected {self.lowest:g} to {self.highest:g}")
        return (score - self.lowest) / (self.highest - self.lowest)


def _transcript(messages: Sequence[Message]) -> str:
    return "\n\n".join(m.content if len(messages) == 1 else f"{m.role}: {m.content}" for m in messages)


def _last_reply(rollout: Rollout) -> tuple[str, str]:
    """All before the policy's last reply, and that."""
    spoken = [at for at, message in enumerate(rollout.messages) if message.role == "assistant"]
    return _transcript(rollout.messages[: spoken[-1]] if spoken else rollout.messages), rollout.final_message


def _mean(scores: Sequence[float | Failure]) -> Verdict:
    """The mean of a reply's scores, or why one of them is missing."""
    failures = [each for each in scores if isinstance(each, Failure)]
    return failures[0] if failures else sum(each for each in scores if isinstance(each, float)) / len(scores)


def _disagreement(scores: Sequence[float | Failure]) -> dict[str, float]:
    numbers = [each for each in scores if isinstance(each, float)]
    return {"judge/disagreement": float(max(numbers) - min(numbers) > _SAME)} if len(numbers) > 1 else {}


def _pattern_problem(pattern: str, least: int) -> str | None:
    """What is wrong with a regular expression for the score."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"pattern {pattern!r} is no regular expression: {error}"
    return None if groups >= least else f"pattern {pattern!r} must have {least} groups, the last around the score"
