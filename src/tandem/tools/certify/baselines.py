"""Advantages once more, from the rewards of a step's groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev, stdev

from tandem.tools.certify.formula import Options, Weights
from tandem.types import Rollout

Siblings = Sequence[Rollout]
Values = list[list[float]]


def _rewards(groups: Sequence[Siblings]) -> Values:
    return [[r.reward for r in group if r.reward is not None] for group in groups]


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _dr_grpo(groups: Sequence[Siblings], options: Options, weights: Weights) -> Values:
    return [[r - fmean(rewards) for r in rewards] for rewards in _rewards(groups)]


def _standardised(groups: Sequence[Siblings], options: Options, weights: Weights) -> Values:
    std = _spread if options["std"] == "sample" else pstdev
    return [[(r - fmean(rewards)) / (std(rewards) + options["eps"]) for r in rewards] for rewards in _rewards(groups)]


def _rloo(groups: Sequence[Siblings], options: Options, weights: Weights) -> Values:
    def others(rewards: Sequence[float], i: int) -> float:
        return fmean([*rewards[:i], *rewards[i + 1 :]]) if len(rewards) > 1 else rewards[i]

    return [[r - others(rewards, i) for i, r in enumerate(rewards)] for rewards in _rewards(groups)]


def _batch_std(groups: Sequence[Siblings], options: Options, weights: Weights) -> Values:
    std = _spread([r for rewards in _rewards(groups) for r in rewards])
    return [[v / (std + options["eps"]) for v in values] for values in _dr_grpo(groups, options, weights)]


def _maxrl(groups: Sequence[Siblings], options: Options, weights: Weights) -> Values:
    return [[r / fmean(rewards) - 1 if sum(rewards) else 0.0 for r in rewards] for rewards in _rewards(groups)]


def _gdpo(groups: Sequence[Siblings], options: Options, weights: Weights) -> Values:
    sums: Values = []
    for group, env in ((group, group[0].task.env) for group in groups):
        weigh = {name: weights.get(env, {}).get(name, 1.0) for r in group for name in r.rewards}
        parts: list[dict[str, float]] = []
        for rollout in group:
            rest = (rollout.reward or 0.0) - sum(weigh[name] * value for name, value in rollout.rewards.items())
            parts.append({**rollout.rewards, "": rest})
        sums.append([0.0] * len(group))
        for name in {name for part in parts for name in part}:
            given = [part[name] for part in parts if name in part]
            for i, part in enumerate(parts):
                if name in part:
                    scaled = (part[name] - fmean(given)) / (_spread(given) + options["eps"])
                    sums[-1][i] += weigh.get(name, 1.0) * scaled
    every = [value for values in sums for value in values]
    return [[(value - fmean(every)) / (_spread(every) + options["eps"]) for value in values] for values in sums]


ADVANTAGES: Mapping[str, Callable[[Sequence[Siblings], Options, Weights], Values]] = {
    "dr_grpo": _dr_grpo,
    "grpo": _standardised,
    "rloo": _rloo,
    "batch_std": _batch_std,
    "maxrl": _maxrl,
    "gdpo": _gdpo,
}
"""Advantage of every rollout that counts, given those of every group."""
