"""Numeric match: the last number of the reply against the gold answer's."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import bounded
from tandem.rewards._answers import last_number, same_number
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Number(Reward):
    """1 if the last number in the reply is the gold answer's; $, thousands separators and full stops are ignored."""

    tolerance: float = bounded(1e-6, below=1)
    """Largest difference, as a share of the gold number (of 1 if that is smaller)."""
    after: str = ""
    """Only numbers after the last such text count, for example ####; empty: all do."""

    def __call__(self, rollout: Rollout) -> float:
        if (gold := last_number(rollout.task.answer)) is None:
            raise ValueError(f"the gold answer {rollout.task.answer!r} of task {rollout.task.id} holds no number")
        reply = rollout.final_message
        if self.after:
            _, marker, reply = reply.rpartition(self.after)
            if not marker:
                return 0.0
        number = last_number(reply)
        return float(number is not None and same_number(number, gold, self.tolerance))

    def phrase(self, answer: str) -> str:
        return answer if self.after in answer else f"{self.after} {answer}"
