"""reasoning-gym verifiers: each task's own scoring function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tandem.errors import RewardError
from tandem.importing import library
from tandem.rewards._answers import in_tag, is_number, last_number, last_tag
from tandem.rewards.base import Reward
from tandem.types import Json, Rollout


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward(Reward):
    """1 if the task's own verifier gives the extracted answer full marks; else 0, or its partial credit."""

    extract: Literal["auto", "tag", "last_number", "whole"] = "auto"
    """What of the reply is the answer. auto: the last tag if there is one, else the last number if the gold
    answer is a number, else the whole reply."""
    tag: str = "answer"
    """Name of the tag."""
    partial: bool = False
    """Keep the verifier's partial credit. For numbers most verifiers give some for 13 where 3 was right."""

    def inert(self) -> Mapping[str, str]:
        """Options that change nothing, and why."""
        return {"tag": f"extract is {self.extract}"} if self.extract in ("last_number", "whole") else {}

    def prepare(self) -> None:
        library("reasoning_gym", "reward reasoning_gym", "reasoning-gym", RewardError)

    def __call__(self, rollout: Rollout) -> float:
        task = rollout.task
        if "task" not in task.meta or "metadata" not in task.meta:
            raise ValueError(f"task {task.id} is not from reasoning-gym: it needs meta['task'] and meta['metadata']")
        gold = None if task.meta.get("unsolved") else task.answer
        answer = self._extracted(rollout.final_message, task.answer)
        entry = {"question": task.meta["question"], "answer": gold, "metadata": task.meta["metadata"]}
        score = _verifier(task.meta["task"], json.dumps(task.meta.get("config", {})))(answer, entry)
        return float(score) if self.partial or score >= 1 else 0.0

    def phrase(self, answer: str) -> str:
        return in_tag(answer, self.tag) if self.extract == "tag" else answer

    def _extracted(self, reply: str, gold: str) -> str | None:
        tagged = last_tag(reply, self.tag) if self.extract in ("auto", "tag") else None
        if tagged is not None or self.extract == "tag":
            return tagged
        if self.extract == "last_number" or (self.extract == "auto" and is_number(gold)):
            return last_number(reply)
        return reply.strip()


@cache
def _verifier(name: str, config: str) -> Callable[[str | None, Mapping[str, Json]], float]:
    """The scoring function of a task under a configuration (as JSON)."""
    from reasoning_gym import factory

    dataset: Any = factory.create_dataset(name, **json.loads(config))
    score: Callable[[str | None, Mapping[str, Json]], float] = dataset.score_answer
    return score
