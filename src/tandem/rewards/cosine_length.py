"""Cosine length reward: right answers had better be short, by a reward that says which are right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from tandem.errors import ConfigError, bounded
from tandem.rewards.base import GroupReward, Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class CosineLength(Reward):
    """Half a cosine wave over the length, from one value at 0 tokens to another at ``max_tokens`` and beyond.

    With n sampled tokens, L = max_tokens and the values a (short) and b (long) of a right or of a wrong answer:
    r = b + (a - b) (1 + cos(pi min(n, L) / L)) / 2. The shape is that of arXiv 2502.03373 without its exceed-length
    term, and the values are ms-swift's (cosine_min_len_value_correct is ``right_short``, and so on).
    """

    full_marks: ClassVar[None] = None

    accuracy: Reward = field(metadata={"category": "rewards"})
    """The reward that says which answers are right: those to which it gives full marks (1 where it names none)."""
    max_tokens: int = bounded(least=1)
    """Sampled tokens, all turns together, at which an answer is long; usually sampling.max_tokens."""
    right_short: float = 1.0
    """For a right answer of no tokens."""
    right_long: float = 0.5
    """For a right answer of max_tokens."""
    wrong_short: float = -0.5
    """For a wrong answer of no tokens."""
    wrong_long: float = 0.0
    """For a wrong answer of max_tokens: what tried longer may lose less."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.accuracy, GroupReward) or self.accuracy.alone:
            raise ConfigError("accuracy must be a reward of one rollout, and one that needs no process of its own")

    def prepare(self) -> None:
        self.accuracy.prepare()

    def __call__(self, rollout: Rollout) -> float | None:
        if (reward := self.accuracy(rollout)) is None:
            return None
        full = self.accuracy.full_marks
        right = reward >= (1.0 if full is None else full)
        short, long = (self.right_short, self.right_long) if right else (self.wrong_short, self.wrong_long)
        share = min(rollout.num_tokens, self.max_tokens) / self.max_tokens
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2

    def phrase(self, answer: str) -> str:
        return self.accuracy.phrase(answer)
