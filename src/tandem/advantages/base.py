"""What an advantage is: how much better a sibling was than its group."""

from __future__ import annotations

from typing import Protocol

from tandem.types import Group


class Advantage(Protocol):
    """A frozen dataclass whose fields are its options."""

    def __call__(self, group: Group) -> list[float]:
        """One number per ``group.scored`` rollout, in that order; a rollout without siblings gets 0."""
        ...


def scores(group: Group) -> list[float]:
    """Rewards of the scored rollouts: failed ones are in no mean and no deviation."""
    return [rollout.reward for rollout in group.scored if rollout.reward is not None]
