"""Repetition penalty: the share of n-grams that were said before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.errors import bounded
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Repetition(Reward):
    """Minus the share of word n-grams that were said before: 0 for none, close to -1 for a loop."""

    full_marks: ClassVar[None] = None

    ngram: int = bounded(3, least=1)
    """Words in one n-gram."""

    def __call__(self, rollout: Rollout) -> float:
        words = rollout.text.lower().split()
        total = len(words) - self.ngram + 1
        if total < 1:
            return 0.0
        return len({tuple(words[at : at + self.ngram]) for at in range(total)}) / total - 1
