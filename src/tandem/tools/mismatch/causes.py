"""The gap between trainer and engine, split into causes that add up to it, token by token.

Suppositions are taken up one after the other, each time the one that brings the prediction nearest to what the engine
told, as long as it explains much of what is left and chance does not. What each of them moved the prediction by is its
part of the gap; what nobody explains is a part too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tandem.tools.mismatch.evidence import RECORDED, Evidence, Suppose, rms

Category = Literal["staleness", "numerics", "sampling", "tokenisation", "unexplained"]

ENOUGH = 0.25
"""Share of the mean square left that a supposition must explain to be taken up."""
RESAMPLES = 500
"""Of the bootstrap over rollouts."""
FEWEST = 5
"""Rollouts, below which resampling them tells nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cause:
    """One part of the gap."""

    category: Category
    """What kind of thing it is."""
    name: str
    """What happened, for a person."""
    advice: str
    """What to do; empty where there is nothing to do."""
    part_N: Tensor
    """Of each token's gap, nats."""
    fault: bool = True
    """False for what the recipe allows or the type of the weights explains."""


def causes(evidence: Evidence) -> list[Cause]:
    """Every part of the gap, in the order they were split off; they sum to it."""
    out = list(_declared(evidence))
    current = evidence.declared
    for suppose in supposed(evidence):
        part_N = evidence.predicted(current) - evidence.predicted(suppose)
        category, name, advice = _told(evidence, current, suppose)
        out.append(Cause(category=category, name=name, advice=advice, part_N=part_N))
        current = suppose
    return [*out, *_left(evidence, evidence.predicted(current) - evidence.engine_N)]


def supposed(evidence: Evidence) -> list[Suppose]:
    """The suppositions that are taken up, each with those before it."""
    known_N = evidence.known_N if bool(evidence.known_N.any()) else torch.ones_like(evidence.known_N)
    rollouts = Rollouts(evidence.rollout_N[known_N])
    current, out = evidence.declared, list[Suppose]()
    while True:
        left_N = (evidence.predicted(current) - evidence.engine_N)[known_N]
        if rms(left_N) <= 3 * RECORDED:
            return out
        best: tuple[float, Suppose] | None = None
        for suppose in evidence.changes(current):
            # Other weights show beneath rounding, which knows none. Another type does not: to leave out one side's
            # rounding brings the two nearer, whoever rounded.
            if suppose.precision != current.precision and rms(left_N) <= evidence.allowed:
                continue
            after_N = (evidence.predicted(suppose) - evidence.engine_N)[known_N]
            saved_N = left_N.square() - after_N.square()
            share = float(saved_N.sum() / left_N.square().sum())
            low, _ = rollouts.interval(saved_N, left_N.square()) or (share, share)
            if share >= ENOUGH and low > 0 and (best is None or share > best[0]):
                best = (share, suppose)
        if best is None:
            return out
        current = best[1]
        out.append(current)


def _declared(evidence: Evidence) -> Iterator[Cause]:
    """What the stamps say: staleness, and how well the trainer's own logprobs are found again."""
    again_N, stale_N = evidence.retrained_N, torch.zeros_like(evidence.gap_N)
    aged_N = evidence.lagged_N & evidence.exact_N
    if bool(aged_N.any()):
        stale_N = (evidence.trainer_N if again_N is None else again_N) - evidence.pure_N
        stale_N = torch.where(aged_N, stale_N, 0.0)
        yield Cause(
            category="staleness",
            name="older weights sampled, as max_lag allows",
            advice="lower max_lag (or sync.every), or weigh tokens by a correction",
            part_N=stale_N,
            fault=False,
        )
    if bool((evidence.carried_N & evidence.exact_N).any()):
        yield Cause(
            category="staleness",
            name="answers went on across an update, on keys and values of older weights",
            advice="shorter answers or a lower max_lag cross fewer updates; corrections weigh these tokens too",
            part_N=evidence.pure_N - evidence.anchor_N,
            fault=False,
        )
    trainer_N = evidence.trainer_N - evidence.pure_N - stale_N
    within = rms(trainer_N) <= evidence.allowed
    yield Cause(
        category="numerics" if within else "unexplained",
        name="the trainer's logprobs, computed once more",
        advice=""
        if within
        else "the trainer recorded other logprobs than its weights give here: was it another machine, or other code?",
        part_N=trainer_N,
        fault=not within,
    )


def _told(evidence: Evidence, before: Suppose, suppose: Suppose) -> tuple[Category, str, str]:
    """Category, name and advice of the one thing that a supposition adds."""
    if suppose.transform != before.transform:
        also = " (raw logprobs)" if not suppose.transform.temperature and suppose.transform.support else ""
        return (
            "sampling",
            f"{suppose.transform.name}{also}",
            "let the engine tell logprobs of the distribution it draws from (vLLM: logprobs_mode processed_logprobs)",
        )
    if suppose.weights != before.weights and suppose.weights is not None:
        stamped = ", ".join(map(str, sorted(evidence.stamped)))
        return (
            "staleness",
            f"the engine sampled from {suppose.weights.name}, stamped {stamped}",
            "weights were stamped but did not arrive: look at the engine's log and at how sync sends them",
        )
    if suppose.precision != before.precision:
        return (
            "numerics",
            f"the engine computed {suppose.precision.name}",
            "give both sides the same type (dtype of the recipe, the engine's own options), above all for the head",
        )
    return (
        "tokenisation",
        "the engine was given the conversation tokenised anew",
        "send the engine the recorded token ids, never text or messages: what was sampled must not be tokenised again",
    )


def _left(evidence: Evidence, left_N: Tensor) -> Iterator[Cause]:
    """What no supposition explains: rounding if it is small enough, else unexplained or unknowable."""
    known_N = evidence.known_N
    known = rms(left_N[known_N])
    unknown = rms(left_N[~known_N])
    numerics_N = torch.zeros_like(left_N)
    if known <= evidence.allowed:
        numerics_N = torch.where(known_N, left_N, numerics_N)
    if unknown <= evidence.allowed:
        numerics_N = torch.where(known_N, numerics_N, left_N)
    else:
        missing = ", ".join(str(v) for v in sorted(evidence.stamped) if v not in evidence.lab.versions)
        yield Cause(
            category="unexplained",
            name=f"staleness or else: no weights of version {missing} are on disk",
            advice="keep checkpoints of these versions (checkpoint.every, checkpoint.keep), or look at another step",
            part_N=torch.where(known_N, 0.0, left_N),
        )
    if known > evidence.allowed:
        yield _of_size(evidence, torch.where(known_N, left_N, 0.0), known)
    yield Cause(category="numerics", name="rounding", advice="", part_N=numerics_N, fault=False)


def _of_size(evidence: Evidence, part_N: Tensor, size: float) -> Cause:
    """What is left is called numerics only if it is as large as another type would make it."""
    for precision in evidence.lab.precisions:
        noise = evidence.noise(precision)
        if precision.body.itemsize < evidence.lab.own.body.itemsize and noise / 3 <= size <= 3 * math.sqrt(2) * noise:
            return Cause(
                category="numerics",
                name=f"as large as {precision.name} would make it",
                advice="give both sides the same type; that nothing else lies beneath can only be seen then",
                part_N=part_N,
            )
    approximate = bool((evidence.known_N & ~evidence.exact_N).any())
    return Cause(
        category="unexplained",
        name="none of what was tried" + (", by the weights of another version" if approximate else ""),
        advice="other weights than those on disk, another model or template on the engine's side, or logprobs that "
        "belong to other tokens",
        part_N=part_N,
    )


class Rollouts:
    """Resamples of whole rollouts: tokens of one are not independent."""

    def __init__(self, rollout_N: Tensor):
        _, self._of_N = torch.unique(rollout_N, return_inverse=True)
        self._count = int(self._of_N.max()) + 1 if rollout_N.numel() else 0
        drawn = torch.randint(max(1, self._count), (RESAMPLES, self._count), generator=torch.Generator().manual_seed(0))
        self._times = torch.zeros(RESAMPLES, self._count, dtype=torch.float64)
        self._times.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))

    def interval(self, above_N: Tensor, below_N: Tensor) -> tuple[float, float] | None:
        """95 % interval of the ratio of two sums; None with too few rollouts to tell."""
        if self._count < FEWEST:
            return None
        above, below = (self._times @ self._sums(values_N) for values_N in (above_N, below_N))
        ratio = torch.where(below > 0, above / below, 0.0)
        low, high = torch.quantile(ratio, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high

    def _sums(self, values_N: Tensor) -> Tensor:
        return torch.zeros(self._count, dtype=torch.float64).index_add_(0, self._of_N, values_N)
