"""Reward that the environment gave while the rollout was played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class EnvironmentReward(Reward):
    """A number among those that the environment's ``play`` returned."""

    full_marks: ClassVar[None] = None

    metric: str = "reward"
    """Its name."""

    def __call__(self, rollout: Rollout) -> float:
        if self.metric not in rollout.metrics:
            raise ValueError(f"the environment gave no {self.metric!r}; it gave: {', '.join(rollout.metrics)}")
        return rollout.metrics[self.metric]
