"""Environment mixture: which environment each group of a batch comes from, by weights."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

from tandem.config.sources import exactly
from tandem.errors import Starved
from tandem.rollout.task_sampler import EnvRunner
from tandem.types import Group

log = logging.getLogger(__name__)

REST = 20
"""Batches for which an environment that gave nothing to train on is left out, before it is tried again."""
SAME = 4
"""Least groups that must fail in the same way before the failure is taken for that of every group."""


class MixtureSchedule:
    """The environment of each place of each batch: a function of the weights and the batch's number alone.

    Every batch credits each environment with its share of the places, and the places go to those with most credit; what
    a batch cannot divide evenly is made up for in the next. So shares hold over time to within one place or so, and an
    environment has ``floor(min_share * places)`` places of every batch.
    """

    def __init__(self, runners: Sequence[EnvRunner], places: int) -> None:
        """Of batches with this many places."""
        self._names = [runner.name for runner in runners]
        shares = _shares(runners)
        scale = math.lcm(*(share.denominator for share in shares))
        # Whole numbers, in units of 1/scale of a place: nothing is ever rounded, however long the run.
        self._earned = [int(share * scale) * places for share in shares]
        self._least = [math.floor(exactly(runner.min_share) * places) for runner in runners]
        self._scale, self._places = scale, places
        self._credit = [0] * len(runners)
        self._counts: list[tuple[int, ...]] = []

    def counts(self, batch: int) -> Mapping[str, int]:
        """Groups of each environment in a batch, from 0."""
        while len(self._counts) <= batch:
            self._counts.append(self._next())
        return dict(zip(self._names, self._counts[batch], strict=True))

    def batch(self, batch: int) -> list[str]:
        """Environments of a batch's places, each one's spread evenly over it."""
        named = enumerate(self.counts(batch).items())
        spread = [(Fraction(2 * nth + 1, 2 * n), at, name) for at, (name, n) in named for nth in range(n)]
        return [name for _, _, name in sorted(spread)]

    def _next(self) -> tuple[int, ...]:
        counts = list(self._least)
        credit = [had + earned for had, earned in zip(self._credit, self._earned, strict=True)]
        for _ in range(self._places - sum(counts)):
            neediest = max(range(len(counts)), key=lambda at: credit[at] - counts[at] * self._scale)
            counts[neediest] += 1
        self._credit = [had - count * self._scale for had, count in zip(credit, counts, strict=True)]
        return tuple(counts)


def _shares(runners: Sequence[EnvRunner]) -> list[Fraction]:
    """What part of all groups each environment gets: by weight, but never below its least share."""
    least = [exactly(runner.min_share) for runner in runners]
    weights = [exactly(runner.weight) for runner in runners]
    lifted: set[int] = set()
    while True:
        left = 1 - sum((least[at] for at in lifted), start=Fraction(0))
        total = sum((weight for at, weight in enumerate(weights) if at not in lifted), start=Fraction(0))
        shares = [least[at] if at in lifted else left * weights[at] / total for at in range(len(weights))]
        below = {at for at, share in enumerate(shares) if share < least[at]}
        if not below:
            return shares
        lifted |= below


class EnvMixture:
    """The mixture schedule without environments that currently give nothing to train on.

    An environment whose groups are dropped one after the other is left out for ``REST`` batches, and its places go to
    the others by their shares. Then it is tried again: the first group of it that can be trained on brings it back, and
    one batch's worth of others sends it away again. What is decided depends on the groups and their order alone.
    """

    def __init__(self, runners: Sequence[EnvRunner], places: int, max_dropped_batches: int) -> None:
        """Of batches with this many places; ``max_dropped_batches`` as in ``RolloutBuffer``."""
        self._runners = {runner.name: runner for runner in runners}
        self._places, self._max_dropped_batches = places, max_dropped_batches
        self._schedules: dict[tuple[str, ...], MixtureSchedule] = {}
        self._spent: set[str] = set()
        self._barren: Counter[str] = Counter()  # groups of each environment that were dropped in a row
        self._only_failure: dict[str, str] = {}  # that all groups of an environment ended with; "" if any did not
        self.resting: dict[str, int] = {}
        """The batch from which an environment is tried again, of those that have given nothing since they were left
        out."""

    def counts(self, batch: int) -> Mapping[str, int]:
        """Groups of each environment in a batch, from 0."""
        return self._schedule(self._awake(batch)).counts(batch)

    def batch(self, batch: int) -> list[str]:
        """Environments of a batch's places."""
        return self._schedule(self._awake(batch)).batch(batch)

    def good(self, env: str) -> None:
        """A group of an environment can be trained on."""
        self._spent.clear()
        self._barren[env] = 0
        self._only_failure[env] = ""
        if self.resting.pop(env, None) is not None:
            log.warning("%s gives groups that can be trained on again; it has its share as before", env)

    def dropped(self, env: str, reason: str, group: Group, batch: int) -> Starved | None:
        """A group of an environment was dropped while a batch was filled; an error if none is left to fill it.

        Where every group of the run so far failed in the same way, those of one batch are enough.
        """
        failure = _failure(group) if reason == "failed" else ""
        if self._only_failure.setdefault(env, failure) != failure:
            self._only_failure[env] = ""
        if self.resting.get(env, 0) > batch:
            return None  # of those that were being played when it was left out
        self._barren[env] += 1
        count, whole = self._barren[env], max(1, self._schedule(tuple(self._runners)).counts(batch)[env])
        again, most = env in self.resting, self._max_dropped_batches * whole
        if self._only_failure[env]:
            most = min(most, max(whole, SAME) - 1)
        if count <= (whole - 1 if again else most):
            return None
        self._spent.add(env)
        if len(self._spent) == len(self._runners):
            nor = ", nor those of the other environments" if len(self._runners) > 1 else ""
            return Starved(f"{_seen(count, reason, group)}{nor}. {_advice(reason, env)}")
        self.resting[env], self._barren[env] = batch + REST, 0
        if not self._awake(batch):  # the others are tried at once: they may have something by now
            self.resting.update(dict.fromkeys(self._runners.keys() - self._spent, batch))
        level, rests = logging.INFO if again else logging.WARNING, f"the others have its share for {REST} steps"
        log.log(level, "%s: %s; %s. %s", env, _seen(count, reason, group), rests, _advice(reason, env))
        return None

    def _awake(self, batch: int) -> tuple[str, ...]:
        return tuple(name for name in self._runners if self.resting.get(name, 0) <= batch)

    def _schedule(self, names: tuple[str, ...]) -> MixtureSchedule:
        if names not in self._schedules:
            self._schedules[names] = MixtureSchedule([self._runners[name] for name in names], self._places)
        return self._schedules[names]


def _failure(group: Group) -> str:
    """What every rollout of a group failed with, whatever the numbers in it; empty if it was not the same."""
    failures = {re.sub(r"\d+", "0", rollout.error) for rollout in group.rollouts}
    return failures.pop() if len(failures) == 1 else ""


def _advice(reason: str, env: str) -> str:
    if reason == "failed":
        return f"Mend what fails in {env}; logs/run.log and logs/graders.log of the run have the tracebacks"
    keep = "keep such groups (zero_variance_groups: keep), or, if it could solve them before, lower optimizer.lr"
    return f"Make {env} easier or harder, sample more answers (group_size), raise the temperature, {keep}"


def _seen(count: int, reason: str, group: Group) -> str:
    example = group.rollouts[0]
    detail = f"the last group, {group.id}, got rewards {[r.reward for r in group.rollouts]}"
    if reason == "failed":
        detail += f"; first failure: {next((r.error for r in group.rollouts if r.error), 'no reward')}"
    else:
        detail += f"; its first answer was {example.text[:200]!r}"
    return f"{count} groups in a row could not be trained on ({reason}); {detail}"
