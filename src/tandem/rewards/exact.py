"""Exact match with the gold answer."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.rewards._answers import in_tag, last_tag
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class ExactReward(Reward):
    """1 if the reply is the gold answer, spaces around it aside; else 0."""

    tag: str = ""
    """Compare what stands in the last <tag>...</tag>; empty: the whole reply."""
    ignore_case: bool = False
    """Treat capital and small letters as the same."""

    def __call__(self, rollout: Rollout) -> float:
        reply = rollout.final_message
        answer = last_tag(reply, self.tag) if self.tag else reply
        if answer is None:
            return 0.0
        answer, gold = answer.strip(), rollout.task.answer.strip()
        if self.ignore_case:
            answer, gold = answer.casefold(), gold.casefold()
        return float(answer == gold)

    def phrase(self, answer: str) -> str:
        return in_tag(answer, self.tag)

    @property
    def full_marks(self) -> float | None:
        return None if self.tag else 1.0  # only the environment knows whether its gold replies wear the tag
