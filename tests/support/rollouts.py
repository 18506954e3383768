"""Made-up groups: rollouts as the feed hands them to the packer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.types import Completion, Finish, Group, Message, Rollout, Task, Turn

SampledTurn = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""One turn: the token ids before it, the sampled ones and their logprobs."""


def make_rollout(
    id: str,
    sampled_turns: Sequence[SampledTurn],
    reward: float | None,
    *,
    temperature: float | Sequence[float] = 1.0,
    finish: Finish = "stop",
    version: int = 0,
) -> Rollout:
    temperatures = [temperature] * len(sampled_turns) if isinstance(temperature, float) else list(temperature)
    turns = tuple(
        Turn(
            prompt=tuple(prompt),
            completion=Completion(
                tokens=tuple(tokens), logprobs=tuple(logprobs), versions=(version,) * len(tokens), finish=finish
            ),
            temperature=at,
        )
        for (prompt, tokens, logprobs), at in zip(sampled_turns, temperatures, strict=True)
    )
    task = Task(id=id.partition("@")[0], env="made", prompt=(Message(role="user", content="?"),), answer="")
    return Rollout(id=id, task=task, turns=turns, messages=task.prompt, status="ok", reward=reward)


def answered(id: str, text: str, reward: float | None, **more: Any) -> Rollout:
    """A rollout whose policy said ``text``, in two tokens."""
    rollout = make_rollout(id, [((1,), (2, 3), (-1.0, -1.0))], reward, **more)
    return replace(rollout, messages=(*rollout.messages, Message(role="assistant", content=text)))


def make_group(id: str, rollouts: Sequence[Rollout], *, index: int = 0) -> Group:
    return Group(id=id, index=index, env="made", rollouts=tuple(rollouts))
