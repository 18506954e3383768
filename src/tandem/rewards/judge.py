"""LLM judge: a score by a language model behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tandem.errors import ConfigError, RewardError, bounded, redacted
from tandem.rewards.base import Failure, GroupReward, Verdict
from tandem.types import Rollout, column

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

[Your task]
How good is the reply, from {lowest} (wrong or useless) to {highest} (right, complete and clear)? Say briefly why, \
then end with a line "Score: N"."""

_PATTERN = r"(?im)^[^\w\n-]*(?:score[^\w\n-]*)?(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?[^\w\n]*$"

_NEVER = (401, 403, 404)
"""Statuses that no other question would change: a wrong key, URL or model."""
_LATER = (408, 429)
"""Statuses below 500 with which the same question may be asked again."""
_MOST_BYTES = 4 << 20
"""Largest answer of a judge."""
_SLACK = 10.0
"""Seconds beyond the deadline after which the judge's process is thought to hang."""


@dataclass(frozen=True, kw_only=True)
class Judge(GroupReward):
    """The score that a language model gives, scaled to 0 to 1. Equal replies of a group are scored once.

    A server that answers 429 or 5xx, or not at all, is asked again after a pause that doubles (or that it names).
    """

    full_marks: ClassVar[None] = None

    url: str
    """Base URL of the API, such as http://127.0.0.1:8000/v1; /chat/completions is added."""
    model: str
    """What the server calls the judge."""
    template: str = _TEMPLATE
    """The question; {prompt}, {reply}, {answer}, {lowest}, {highest} and {column} of the task's meta are filled in."""
    system: str = ""
    """System message; empty: none."""
    pattern: str = _PATTERN
    """Regular expression whose first group is the score; its last match counts. As it is: a line with nothing but a
    number, 'Score: 7' or '7/10'."""
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
    backoff_seconds: float = bounded(1.0, above=0)
    """Seconds before it is asked again for the first time; each time they double."""
    deadline_seconds: float = bounded(300.0, above=0)
    """Seconds that the questions about one group may take, with all that are asked again."""
    away: Literal["leave_out", "none", "stop"] = "leave_out"
    """If there is no answer in the end: leave the rollout out of its group, leave this reward out of the rollout's
    sum, or end the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if not self.url.startswith(("http://", "https://")):
            problems.append(f"url must begin with http:// or https://, got {self.url!r}")
        if "{reply}" not in self.template:
            problems.append("template must have {reply} in it, or the judge would not see what it judges")
        if not -math.inf < self.lowest < self.highest < math.inf:
            problems.append(f"highest must be above lowest ({self.lowest:g}), got {self.highest:g}")
        try:
            if not re.compile(self.pattern).groups:
                problems.append(f"pattern {self.pattern!r} must have a group (in brackets) around the score")
        except re.error as error:
            problems.append(f"pattern {self.pattern!r} is no regular expression: {error}")
        if problems:
            raise ConfigError("\n".join(problems))

    def inert(self) -> Mapping[str, str]:
        """Options that change nothing, and why."""
        return {} if self.retries else {"backoff_seconds": "retries is 0: nothing is asked again"}

    def prepare(self) -> None:
        """Look for the key; raises RewardError if it is not there."""
        if self.key_variable and not os.environ.get(self.key_variable):
            raise RewardError(f"reward judge: key_variable: {self.key_variable} is not set in the environment")

    async def scores(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        """One verdict per rollout; raises ValueError if the template names what a task does not have."""
        from tandem.http import HttpClient  # loads aiohttp

        questions = [self._question(rollout) for rollout in rollouts]
        gate = asyncio.Semaphore(self.concurrency)
        key = os.environ.get(self.key_variable, "") if self.key_variable else ""
        base = self.url.rstrip("/").removesuffix("/chat/completions")
        client = HttpClient(f"{base}/chat/completions", key, kind="judge", most_bytes=_MOST_BYTES)

        async def ask(question: str) -> str | Failure:
            async with gate:
                return await self._ask(client, question)

        answers = {question: asyncio.ensure_future(ask(question)) for question in dict.fromkeys(questions)}
        try:
            await asyncio.wait(answers.values(), timeout=self.deadline_seconds)
        finally:
            late = [task for task in answers.values() if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await client.close()
        return [self._verdict(answers[question]) for question in questions]

    async def _ask(self, client: HttpClient, question: str) -> str | Failure:
        """The judge's words, or why there are none; asks again while the server is away."""
        from tandem.http import HttpError, HttpStatusError, RetryPolicy

        body, headers = json.dumps(self._body(question)).encode(), {"Content-Type": "application/json"}
        pauses = RetryPolicy(first_seconds=self.backoff_seconds, max_seconds=math.inf)
        why = ""
        for attempt in range(self.retries + 1):
            pause, text = 0.0, ""
            try:
                response = await client.call("POST", "", body, headers, self.timeout_seconds)
                text = response.body.decode(errors="replace")
                choice = json.loads(text)["choices"][0]
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
                    return answer
                end = f"finish_reason {choice.get('finish_reason')}; max_tokens may be too small"
                return Failure("raised", f"got an answer without text from the judge ({end})")
            if attempt < self.retries:
                await pauses.pause(attempt, pause)
        times = f", asked {self.retries + 1} times" if self.retries else ""
        return self._unanswered(f"had no answer from {redacted(client.url)}: {why}{times}")

    @property
    def call_seconds(self) -> float:
        return self.deadline_seconds + _SLACK

    def _question(self, rollout: Rollout) -> str:
        spoken = [at for at, m in enumerate(rollout.messages) if m.role == "assistant"]
        before = rollout.messages[: spoken[-1]] if spoken else rollout.messages
        texts = [m.content if len(before) == 1 else f"{m.role}: {m.content}" for m in before]
        fields = {
            **rollout.task.meta,
            "prompt": "\n\n".join(texts),
            "reply": rollout.final_message,
            "answer": rollout.task.answer,
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }
        try:
            return _PLACE.sub(lambda place: str(column(fields, place[1])), self.template)
        except KeyError as error:
            missing, has = error.args[0], ", ".join(fields)
            raise ValueError(f"template names {{{missing}}}; task {rollout.task.id} has: {has}") from None

    def _body(self, question: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            **self.request,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _verdict(self, task: asyncio.Task[str | Failure]) -> Verdict:
        if task.cancelled():
            return self._unanswered(f"had no answer from {redacted(self.url)} within {self.deadline_seconds:g} s")
        answer = task.result()
        if isinstance(answer, Failure):
            return answer
        matches = [match for match in re.finditer(self.pattern, answer) if match[1]]
        try:
            score = float(matches[-1][1])
        except (IndexError, ValueError):
            return Failure("bad_value", f"found no score in the judge's answer ...{answer[-60:]!r}")
        if not self.lowest <= score <= self.highest:
            return Failure(
                "bad_value", f"was given {score:g}, expected a score from {self.lowest:g} to {self.highest:g}"
            )
        return (score - self.lowest) / (self.highest - self.lowest)

    def _unanswered(self, text: str) -> Failure:
        costs = {"leave_out": "rollout", "none": "reward", "stop": "run"}
        return Failure("away", text, costs[self.away])  # type: ignore[arg-type]
