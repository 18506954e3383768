"""What a reward is: a number for one finished rollout. Runs in a worker process that can be killed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tandem.types import Rollout


class Reward(ABC):
    """A frozen dataclass whose fields are its options; it must pickle, and never imports torch.

    A plain function by import path works too: ``f(rollout)``, or with TRL's signature
    ``f(completions, **columns)``; either may be async.
    """

    @abstractmethod
    def __call__(self, rollout: Rollout) -> float | None:
        """Reward of one rollout, unweighted; None leaves the rollout out of its group."""

    def prepare(self) -> None:
        """Import what is needed. Called once in each worker process, before the first deadline runs.

        Raises:
            RewardError: a library is missing; names the extra to install.
        """
        return

    @property
    def full_marks(self) -> float | None:
        """What a gold reply earns, or None where a gold reply proves nothing (length, repetition)."""
        return 1.0
