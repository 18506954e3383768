"""reasoning-gym verifiers: each task's own scoring function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tandem.errors import RewardError
from tandem.importing import library
from tandem.rewards._answers import is_number, last_number, last_tag
from tandem.rewards.base import Reward
from tandem.types import Json, Rollout


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward(Reward):
    """1 if the task's own verifier gives the answer full marks; else 0, or its partial credit.

    The answer is what stands in the reply's last tag; without one, the last number if the gold answer is a number, else
    the whole reply.
    """

    tag: str = "answer"
    """Name of the tag."""
    partial: bool = False
    """Keep the verifier's partial credit. For numbers most verifiers give some for 13 where 3 was right."""

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

    def _extracted(self, reply: str, gold: str) -> str | None:
        if (tagged := last_tag(reply, self.tag)) is not None:
            return tagged
        return last_number(reply) if is_number(gold) else reply.strip()


@cache
def _verifier(name: str, config: str) -> Callable[[str | None, Mapping[str, Json]], float]:
    """The scoring function of a task under a configuration (as JSON)."""
    from reasoning_gym import factory

    dataset: Any = factory.create_dataset(name, **json.loads(config))
    score: Callable[[str | None, Mapping[str, Json]], float] = dataset.score_answer
    return score
