"""Soft overlong punishment (DAPO): a ramp before the token limit instead of a cliff at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.errors import ConfigError
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Overlong(Reward):
    """0 up to ``max_tokens - cache`` tokens, then a straight line down to -1 at ``max_tokens`` and beyond."""

    full_marks: ClassVar[None] = None

    max_tokens: int
    """Sampled tokens, all turns together, at which the punishment is full; usually sampling.max_tokens."""
    cache: int
    """Tokens before the limit over which the punishment grows."""

    def __post_init__(self) -> None:
        if not 1 <= self.cache <= self.max_tokens:
            raise ConfigError(f"cache must be from 1 to max_tokens ({self.max_tokens}), got {self.cache}")

    def __call__(self, rollout: Rollout) -> float:
        over = rollout.num_tokens - (self.max_tokens - self.cache)
        return -min(1.0, over / self.cache) if over > 0 else 0.0
