"""Who has the last word on a group's rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tandem.types import Group

Judge = Callable[[Group], Group]
"""Last word on a group's rewards before it is judged flat (truncation penalties, for instance)."""


def penalise_truncated(penalty: float) -> Judge:
    """A judge that subtracts ``penalty`` from the reward of every answer cut by a length limit."""

    def judge(group: Group) -> Group:
        rollouts = [
            replace(r, reward=r.reward - penalty) if r.truncated and r.reward is not None else r for r in group.rollouts
        ]
        return replace(group, rollouts=tuple(rollouts))

    return judge


def as_is(group: Group) -> Group:
    """A judge that changes nothing."""
    return group
