"""The advantage contract: how much better a rollout was than its group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Real
from typing import Protocol, Self, runtime_checkable

from tandem.errors import ConfigError
from tandem.types import Group, Rollout


class Advantage(Protocol):
    """How much better each rollout was than its group. A frozen dataclass whose fields are its options.

    Example:
        >>> import tandem
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class AboveBest:
        ...     def __call__(self, group: tandem.Group) -> list[float]:
        ...         best = max((rollout.reward for rollout in group.scored), default=0.0)
        ...         return [rollout.reward - best for rollout in group.scored]
        >>> advantage: tandem.Advantage = AboveBest()
        >>> advantage(tandem.Group(id="train/1@0", index=0, env="sums", rollouts=()))
        []
    """

    def __call__(self, group: Group) -> list[float]:
        """One number per ``group.scored`` rollout, in that order; a rollout without siblings gets 0."""


@runtime_checkable
class Rescales(Protocol):
    """An advantage that also depends on all groups of a step."""

    def rescale(self, groups: Sequence[Group], values: Sequence[Sequence[float]]) -> list[list[float]]:
        """The groups' advantages, given those computed group by group."""


@runtime_checkable
class Weighs(Protocol):
    """An advantage that uses individual rewards, and so needs their weights."""

    def weighed(self, weights: Mapping[str, Mapping[str, float]]) -> Self:
        """The same with the weight of each reward, by environment and by its name."""


@runtime_checkable
class ByTurn(Protocol):
    """An advantage whose turns have one each."""

    def by_turn(self, group: Group) -> list[list[float]]:
        """Of each turn with tokens of each ``group.scored`` rollout."""


def spread(advantage: ByTurn, group: Group) -> Group:
    """The group, each rollout with the advantage of every token, unless its environment gave them."""
    by_id = dict(zip((rollout.id for rollout in group.scored), advantage.by_turn(group), strict=True))
    return replace(group, rollouts=tuple(_spread(rollout, by_id.get(rollout.id)) for rollout in group.rollouts))


def _spread(rollout: Rollout, by_turn: Sequence[float] | None) -> Rollout:
    if rollout.advantages is not None or by_turn is None:
        return rollout
    counts = [count for turn in rollout.turns if (count := len(turn.completion.tokens))]
    tokens = chain.from_iterable((value,) * count for value, count in zip(by_turn, counts, strict=True))
    return replace(rollout, advantages=tuple(tokens))


def advantages(advantage: Advantage, groups: Sequence[Group]) -> list[list[float]]:
    """Advantages of every group of one step.

    Raises:
        ConfigError: the advantage, which may be a user's own, did not return a number for each scored rollout.
    """
    values = [_numbers(advantage, group) for group in groups]
    return advantage.rescale(groups, values) if isinstance(advantage, Rescales) else values


def _numbers(advantage: Advantage, group: Group) -> list[float]:
    returned: object = advantage(group)
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # of numpy or torch
    count = len(group.scored)
    if not isinstance(values, list | tuple) or len(values) != count or not all(isinstance(v, Real) for v in values):
        what = f"advantage {type(advantage).__name__} returned {str(returned)[:80]!r} for group {group.id}"
        raise ConfigError(f"{what}; expected a list of {count} numbers, one for each rollout of group.scored")
    return [float(value) for value in values]


def scores(group: Group) -> list[float]:
    """Rewards of the scored rollouts, without failed ones."""
    return [rollout.reward for rollout in group.scored if rollout.reward is not None]


def centred(values: Sequence[float]) -> list[float]:
    """Deviations from the mean; exactly 0 if all values are equal, so that nothing is computed for them."""
    if not values:
        return []
    mean = math.fsum(values) / len(values)
    mean = min(max(mean, min(values)), max(values))  # the mean of 0.1, 0.1 and 0.1 is rounded to more than 0.1
    return [value - mean for value in values]


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (squares over n - 1); 0 for fewer than two values."""
    return math.sqrt(math.fsum(d * d for d in centred(values)) / max(1, len(values) - 1))
