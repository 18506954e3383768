"""Length reward: how close the answer's length is to a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class LengthReward(Reward):
    """1 at the target length, falling in a straight line to 0 at ``span`` tokens from it."""

    target: int
    """Wanted number of sampled tokens, all turns together."""
    span: int | None = None
    """Tokens from the target at which the reward is 0; none: the target itself."""
    side: Literal["both", "longer", "shorter"] = "both"
    """Which answers lose: both kinds, only longer ones, or only shorter ones."""

    def __post_init__(self) -> None:
        if self.target < 1:
            raise ConfigError(f"target must be at least 1, got {self.target}")
        if self.span is not None and self.span < 1:
            raise ConfigError(f"span must be at least 1, got {self.span}")

    def __call__(self, rollout: Rollout) -> float:
        off = rollout.num_tokens - self.target
        if (off > 0 and self.side == "shorter") or (off < 0 and self.side == "longer"):
            return 1.0
        return max(0.0, 1 - abs(off) / (self.span or self.target))

    @property
    def full_marks(self) -> None:
        return None
