"""Metrics of sampled groups: rewards, lengths, failures, pass@k; over everything sampled, trained or not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import stdev

from tandem.metrics import Histogram, Mean, Sum, Value
from tandem.types import Group, Rollout

FEW = 5.0
"""Tasks that are right, or wrong, below which a bootstrap over tasks is too narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """Predicate of solved rollouts: those with full marks of the recipe's first reward."""

    reward: str
    """Name of that reward."""
    full_marks: float

    def __call__(self, rollout: Rollout) -> bool:
        """True if it was solved; a rollout without that reward was not."""
        return rollout.rewards.get(self.reward, -math.inf) >= self.full_marks - 1e-9


def measure(groups: Sequence[Group], solved: Callable[[Rollout], bool]) -> dict[str, Value]:
    """Metrics of groups that were just scored: of all together, and of each environment under ``env/<name>/``."""
    every = [r for group in groups for r in group.rollouts]
    scored = [r for group in groups for r in group.scored]
    out: dict[str, Value] = {
        "reward": Histogram(tuple(reward for group in groups for reward in _rewards(group))),
        "accuracy": Mean.of(float(solved(r)) for r in scored),
        "reward/group_std": Mean.of(stdev(rewards) for group in groups if len(rewards := _rewards(group)) >= 2),
        "length": Histogram(tuple(float(r.num_tokens) for r in scored)),
        "length/ended": Histogram(tuple(float(r.num_tokens) for r in scored if not r.truncated)),
        "groups/zero_variance": Mean.of(float(g.zero_variance) for g in groups if len(g.scored) >= 2),
        "tokens/generated": Sum(float(sum(r.num_tokens for r in every))),
        "rollouts/failed": Sum(float(sum(r.status == "error" for r in every))),
        "rollouts/truncated": Mean.of(float(r.truncated) for r in scored),
    }
    for name in sorted({name for r in scored for name in r.rewards}):
        out[f"reward/{name}"] = Histogram(tuple(r.rewards[name] for r in scored if name in r.rewards))
    for env in sorted({group.env for group in groups}):
        of = _environment([group for group in groups if group.env == env], solved)
        out |= {f"env/{env}/{name}": value for name, value in of.items()}
    return out


def _rewards(group: Group) -> list[float]:
    return [r.reward for r in group.scored if r.reward is not None]


def _environment(groups: Sequence[Group], solved: Callable[[Rollout], bool]) -> dict[str, Value]:
    """Metrics of one environment's groups, those of its own among them."""
    scored = [r for group in groups for r in group.scored]
    names = sorted({name for r in scored for name in r.metrics})
    return {
        **{name: Mean.of(r.metrics[name] for r in scored if name in r.metrics) for name in names},
        "reward": Mean.of(r.reward for r in scored if r.reward is not None),
        "accuracy": Mean.of(float(solved(r)) for r in scored),
        "groups": Sum(float(len(groups))),
        "zero_variance": Mean.of(float(group.zero_variance) for group in groups if len(group.scored) >= 2),
    }


def pass_at(solved: int, samples: int, k: int) -> float:
    """Chance that at least one of k answers is right, unbiased from ``samples`` of which ``solved`` were.

    1 - C(n-c, k) / C(n, k); arXiv 2107.03374.
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def interval(per_task: Sequence[float], *, resamples: int = 4000) -> tuple[float, float]:
    """95 % interval of the mean of shares: percentile bootstrap over tasks, since answers to one are not independent.

    The bootstrap knows what was seen and no more: of 200 tasks of which none was solved it says 0 to 0. So where less
    than five tasks' worth is right, or wrong, it is widened to Wilson's interval (JASA 1927) of as many answers as
    tasks, which holds there.

    Args:
        per_task: of each task the share that is right, 0 to 1.
        resamples: of the bootstrap.

    Example:
        >>> low, high = interval([0.0] * 200)
        >>> f"{low:.3f} to {high:.3f}"
        '0.000 to 0.019'
    """
    if len(per_task) < 2:
        return (min(per_task, default=math.nan), max(per_task, default=math.nan))
    tasks, right = len(per_task), math.fsum(per_task)
    draw = random.Random(0)  # the same data, the same interval
    means = sorted(math.fsum(draw.choices(per_task, k=tasks)) / tasks for _ in range(resamples))
    low, high = means[round(0.025 * (resamples - 1))], means[round(0.975 * (resamples - 1))]
    if min(right, tasks - right) < FEW:
        rare_low, rare_high = _wilson(right / tasks, tasks)
        low, high = min(low, rare_low), max(high, rare_high)
    return low, high


def _wilson(share: float, count: int) -> tuple[float, float]:
    """95 % score interval of a share of ``count`` answers."""
    square = 1.96**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = 1.96 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
