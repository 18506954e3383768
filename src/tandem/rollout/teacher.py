"""Teacher: scores the policy's own answers, for on-policy distillation.

The advantage of a token is the teacher's logprob of it minus the sampler's: k1 of the KL of the policy to the teacher,
negated. The policy gradient with it is that KL's own gradient, token by token.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tandem.config.sections import Teacher
from tandem.errors import ConfigError, EngineError
from tandem.rollout.template import Template
from tandem.types import Group, Rollout

if TYPE_CHECKING:
    from tandem.http import HttpClient

Score = Callable[[Sequence[int]], Awaitable[Sequence[float]]]
"""Logprob of each token but the first given those before it, at temperature 1."""

_SECONDS = 300.0
"""How long one answer may take to be scored."""
_ATTEMPTS = 8
_PROBE = "What is 17 + 25? Es sind 42, naïvely."
"""A text that tokenizers of two families cut differently."""


async def judged(group: Group, score: Score) -> Group:
    """The group, each token of its rollouts with the advantage that the teacher gives it."""
    return replace(group, rollouts=tuple([await _judged(rollout, score) for rollout in group.rollouts]))


async def _judged(rollout: Rollout, score: Score) -> Rollout:
    advantages: list[float] = []
    scored: Sequence[float] = ()
    whole: tuple[int, ...] = ()
    for turn in reversed(rollout.turns):
        tokens = (*turn.prompt, *turn.completion.tokens)
        if whole[: len(tokens)] != tokens:  # else a later turn goes on from it, and its score has this one's in it
            whole, scored = tokens, await score(tokens)
        logprobs = scored[len(turn.prompt) - 1 : len(tokens) - 1]
        if len(logprobs) != len(turn.completion.tokens) or not all(map(math.isfinite, logprobs)):
            raise EngineError(f"the teacher gave no logprob for each token of {rollout.id}; has it another vocabulary?")
        gaps = [ours - theirs for ours, theirs in zip(logprobs, turn.completion.logprobs, strict=True)]
        advantages = [*gaps, *advantages]
    if not advantages:
        return rollout
    kl = -math.fsum(advantages) / len(advantages)
    return replace(rollout, advantages=tuple(advantages), metrics={**rollout.metrics, "kl_teacher": kl})


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """A teacher that a vLLM server scores with (``prompt_logprobs``)."""

    options: Teacher
    client: HttpClient

    @classmethod
    def of(cls, options: Teacher) -> ServedTeacher:
        """Of a recipe; raises ConfigError if its key is not in the environment."""
        from tandem.http import HttpClient  # loads aiohttp

        key = os.environ.get(options.key_variable, "") if options.key_variable else ""
        if options.key_variable and not key:
            raise ConfigError(f"teacher.key_variable: {options.key_variable} is not set in the environment")
        return cls(options, HttpClient(options.url.removesuffix("/").removesuffix("/v1"), key, kind="teacher"))

    async def check(self, template: Template) -> None:
        """Compare its tokenizer with the policy's; raises ConfigError if they differ."""
        ids = (await self._ask("/tokenize", prompt=_PROBE, add_special_tokens=False))["tokens"]
        if ids != template.more(_PROBE):
            raise ConfigError(f"{self.client.name} has another tokenizer than the policy: it cannot score its tokens")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Logprob of each token but the first."""
        answer = await self._ask(
            "/v1/completions", prompt=list(tokens), max_tokens=1, temperature=0.0, prompt_logprobs=0
        )
        rows = answer["choices"][0].get("prompt_logprobs") or ()
        if len(rows) != len(tokens):
            raise EngineError(f"{self.client.name} gives no prompt_logprobs: it must be vLLM's own server")
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], tokens[1:], strict=True)]

    async def _ask(self, path: str, **body: object) -> dict[str, Any]:
        """A request, again while the server is away; raises EngineError in the end."""
        from tandem.http import HttpError, ResponseLost, RetryPolicy, ServerAway

        model = {"model": self.options.model} if self.options.model else {}
        content = json.dumps({**model, **body}).encode()
        for attempt in range(_ATTEMPTS):
            try:
                headers = {"Content-Type": "application/json"}
                answer: dict[str, Any] = json.loads(
                    (await self.client.call("POST", path, content, headers, _SECONDS)).body
                )
                return answer
            except (ServerAway, ResponseLost) as error:
                if attempt + 1 == _ATTEMPTS:
                    raise EngineError(f"{error}; start the teacher's server, or mend teacher.url") from error
                await RetryPolicy().pause(attempt)
            except (HttpError, ValueError, LookupError) as error:
                raise EngineError(f"{self.client.name} cannot score: {error}; it must be vLLM's own server") from error
        raise AssertionError("the last attempt returns or raises")
