"""Micro-batch balancing: as few micro-batches as fit the token budget, alike in cost.

Tokens are those that are computed: what a tree shares counts once. Cost is in tokens too, each with its attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tandem.trainer.prefix_tree import PrefixTree

ANOTHER = 256
"""Tokens that could be computed in the time that one more micro-batch costs: each ends in short kernels, and adds to
the gradient of every weight. So a prompt is computed twice only where that saves micro-batches enough."""
_TRIES = 8
"""Halvings in the search for the lowest highest cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSamples:
    """The samples of one group as a prefix tree, and the rollout of each."""

    tree: PrefixTree
    rollouts: Sequence[str]
    """Of each sample; those of one rollout follow one another and are kept in that order."""


@dataclass(slots=True)
class Load:
    """A micro-batch under construction."""

    members: dict[int, list[int]] = field(default_factory=dict)
    """By group, the samples of it."""
    tokens: int = 0
    cost: float = 0.0

    def take(self, other: Load) -> None:
        """Add what shares nothing with it."""
        self.members |= other.members
        self.tokens += other.tokens
        self.cost += other.cost


class Balance:
    """Assigns the samples of a step to micro-batches.

    Args:
        families: the groups, each of at least one sample.
        budget: most tokens of a micro-batch; a longer sequence gets one of its own.
        reach: context at which a token's attention costs as much as the rest of the model does for it.
        ranks: processes that compute micro-batches side by side.
    """

    def __init__(self, families: Sequence[GroupSamples], *, budget: int, reach: float, ranks: int = 1):
        self._families = families
        self._budget = budget
        self._reach = reach
        self._ranks = ranks
        self._groups = [self._with(Load(), g, range(len(family.rollouts))) for g, family in enumerate(families)]

    def loads(self) -> list[Load]:
        """The micro-batches, none of no samples. Of what was cut apart, earlier samples are in earlier ones."""
        if not self._families:
            return []
        whole, cut = self._whole(), self._fill(range(len(self._families)), math.inf)
        fewest = min(whole, self._evened(cut, len(cut)), key=lambda loads: (_work(loads), _highest(loads)))
        if self._ranks == 1:
            return fewest
        even = self._evened(cut, -(-len(fewest) // self._ranks) * self._ranks)
        return min(fewest, even, key=lambda loads: _seconds(loads, self._ranks))

    def _whole(self) -> list[Load]:
        """Groups uncut where they fit the budget."""
        closed: list[Load] = []
        units: list[Load] = []
        for g in range(len(self._families)):
            *full, rest = self._fill([g], math.inf)
            closed += full  # before all others, so that what was cut stays in order
            units.append(rest)
        # The longest first, each where there is room: few micro-batches, of which the last may be nearly empty.
        first_fit: list[Load] = []
        for unit in sorted(units, key=lambda unit: -unit.tokens):
            roomy = (load for load in first_fit if load.tokens + unit.tokens <= self._budget)
            if (place := next(roomy, None)) is None:
                first_fit.append(place := Load())
            place.take(unit)
        # As many, the most costly first, each where there is least of those with room: alike, but one may find none.
        even = [Load() for _ in first_fit]
        for unit in sorted(units, key=lambda unit: -unit.cost):
            roomy = (load for load in even if not load.tokens or load.tokens + unit.tokens <= self._budget)
            least = min(roomy, key=lambda load: load.cost, default=None)
            if least is None:
                return closed + first_fit
            least.take(unit)
        return closed + even

    def _evened(self, best: list[Load], most: int) -> list[Load]:
        """The most alike in cost of at most so many, groups one after another, by caps on cost."""
        low, high = sum(load.cost for load in best) / most, _highest(best)
        for _ in range(_TRIES):
            middle = (low + high) / 2
            loads = self._fill(range(len(self._families)), middle)
            if len(loads) <= most:
                best, high = min(best, loads, key=_highest), middle
            else:
                low = middle
        return best

    def _fill(self, groups: Iterable[int], cap: float) -> list[Load]:
        """In order, a new micro-batch where the next samples do not fit; a group that fits is taken at once."""
        loads = [Load()]
        for group in groups:
            last, whole = loads[-1], self._groups[group]
            if self._fits(last.tokens + whole.tokens, last.cost + whole.cost, cap):
                last.take(whole)
                continue
            for part in self._parts(group):
                grown = self._with(loads[-1], group, part)
                if loads[-1].tokens and not self._fits(grown.tokens, grown.cost, cap):
                    grown = self._with(Load(), group, part)
                    loads.append(grown)
                loads[-1] = grown
        return loads

    def _parts(self, group: int) -> Iterator[Sequence[int]]:
        """Its rollouts, the samples of each together if they fit the budget."""
        rollouts = self._families[group].rollouts
        for _, indices in groupby(range(len(rollouts)), key=rollouts.__getitem__):
            samples = list(indices)
            if self._with(Load(), group, samples).tokens <= self._budget:
                yield samples
            else:
                yield from ([sample] for sample in samples)

    def _fits(self, tokens: int, cost: float, cap: float) -> bool:
        return tokens <= self._budget and cost <= cap

    def _with(self, load: Load, group: int, samples: Sequence[int]) -> Load:
        """The same and some samples more."""
        tree, members = self._families[group].tree, list(load.members.get(group, ()))
        tokens, cost = load.tokens, load.cost
        for sample in samples:
            length = tree.lengths[sample]
            shared = max((tree.shared(sample, other) for other in members), default=0)
            tokens += length - shared
            # A token sees those before it and itself.
            seen = (length * (length + 1) - shared * (shared + 1)) / 2
            cost += length - shared + seen / self._reach
            members.append(sample)
        return Load({**load.members, group: members}, tokens, cost)


def _work(loads: Sequence[Load]) -> int:
    """Tokens that all of it takes the time of."""
    return sum(load.tokens + ANOTHER for load in loads)


def _highest(loads: Sequence[Load]) -> float:
    """Cost of the most costly one, which needs the most memory."""
    return max(load.cost for load in loads)


def rounds_of(costs: Sequence[float], ranks: int) -> list[tuple[int | None, ...]]:
    """Micro-batches that ranks compute side by side: for each round the index of each rank's, None where it has none.

    Those of a round are alike in cost, since all of its ranks wait for the most costly one.

    Example:
        >>> rounds_of([3.0, 9.0, 4.0], ranks=2)
        [(1, 2), (0, None)]
    """
    order: list[int | None] = [*sorted(range(len(costs)), key=lambda i: -costs[i])]
    order += [None] * (-len(order) % ranks)
    return [tuple(order[start : start + ranks]) for start in range(0, len(order), ranks)]


def _seconds(loads: Sequence[Load], ranks: int) -> float:
    """Time of all rounds, in tokens: each takes that of its most costly micro-batch."""
    costs = [load.cost for load in loads]
    return sum(max(costs[i] for i in round_ if i is not None) + ANOTHER for round_ in rounds_of(costs, ranks))
