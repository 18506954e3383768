"""The gap between trainer and engine, split into causes that add up to it, token by token.

Suppositions of how the engine computed are taken up one after the other, each time the one that brings the prediction
nearest to what the engine told, as long as it explains much of what is left and chance does not. What each of them
moved the prediction by is its part of the gap; what no supposition explains is a part too. N counts the sampled tokens
of the turns that are looked at, in order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from tandem.rollout.template import Template
from tandem.tools.mismatch.recorded import RecordedTurn, anew
from tandem.tools.mismatch.weights import DECLARED, Lab, Precision, Transform
from tandem.types import Sampling

RECORDED = 4.1e-6
"""Root mean square of what is lost where both logprobs are written with five digits after the point."""
_OTHERS = 4
"""Versions nearest to the stamped ones that are tried beside the model as loaded: each costs a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """Other weights than those stamped."""

    name: str
    """What a person calls it."""
    of: Mapping[int, int]
    """Stamped version to the one that may have sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppose:
    """A hypothesis about how the engine computed its logprobs."""

    precision: Precision
    """In which types."""
    transform: Transform = DECLARED
    """By what done to the logits."""
    weights: Instead | None = None
    """From which weights, if not those stamped."""
    anew: bool = False
    """After the conversation tokenised anew, not after the ids that were recorded."""


class Evidence:
    """The recorded logprobs of one step's tokens, and those computed for any supposition."""

    def __init__(self, turns: Sequence[RecordedTurn], lab: Lab, template: Template, sampling: Sampling):
        """All turns are of one step."""
        self.turns = tuple(turns)
        self.lab = lab
        self.declared = Suppose(precision=lab.own)
        self.trained_version = turns[0].step - 1
        self.engine_N = torch.tensor([value for turn in turns for value in turn.engine], dtype=torch.float64)
        self.trainer_N = torch.tensor([value for turn in turns for value in turn.trainer], dtype=torch.float64)
        self.gap_N = self.trainer_N - self.engine_N
        self.versions = Counter(version for turn in turns for version in turn.versions)
        self.stand_in = {version: self._nearest(version) for version in self.versions}
        self.transforms = tuple(_transforms(turns, sampling))
        self._version_N = torch.tensor([version for turn in turns for version in turn.versions])
        self._anew = [anew(turn, template) for turn in turns]
        self._tables: dict[tuple[int, torch.dtype, bool], dict[tuple[torch.dtype, Transform], Tensor]] = {}
        names = {name: i for i, name in enumerate(dict.fromkeys(turn.rollout for turn in turns))}
        self.rollout_N = torch.tensor([names[turn.rollout] for turn in turns for _ in turn.tokens])

    def _nearest(self, version: int) -> int:
        """The version on disk that stands in for one: itself where it is there."""
        return min(self.lab.versions, key=lambda other: (abs(other - version), other))

    @cached_property
    def _known_lengths(self) -> list[int]:
        """How many leading tokens of each turn were sampled by weights that are on disk, each no older than before."""
        lengths: list[int] = []
        for turn in self.turns:
            fine = (
                version in self.lab.versions and version >= before
                for before, version in zip((0, *turn.versions), turn.versions, strict=False)
            )
            lengths.append(len(list(itertools.takewhile(bool, fine))))
        return lengths

    @cached_property
    def exact_N(self) -> Tensor:
        """True where the weights that sampled a token, and those before it in its turn, are on disk."""
        return self._firsts(self._known_lengths)

    def _firsts(self, lengths: Sequence[int]) -> Tensor:
        """True for as many leading tokens of each turn."""
        each = zip(self.turns, lengths, strict=True)
        return torch.tensor([i < length for turn, length in each for i in range(len(turn.tokens))])

    @cached_property
    def carried_N(self) -> Tensor:
        """True where a token was sampled on keys and values of older weights."""
        return torch.tensor([version != turn.versions[0] for turn in self.turns for version in turn.versions])

    @cached_property
    def lagged_N(self) -> Tensor:
        """True where other weights sampled than were trained."""
        return self._version_N != self.trained_version

    @cached_property
    def known_N(self) -> Tensor:
        """True where it is known what the stamped weights say: they are on disk, or are those that were trained."""
        return self.exact_N | ~(self.lagged_N | self.carried_N)

    @cached_property
    def pure_N(self) -> Tensor:
        """By the stamped weights alone, or by the trainer's where those are not known."""
        return torch.where(self.exact_N, self._logprobs_by(self.declared), self.trainer_N)

    @cached_property
    def anchor_N(self) -> Tensor:
        """What an engine without fault tells: as ``pure_N``, but on the keys and values that were cached before."""
        out_N = self.pure_N.clone()
        lengths = [
            most if len(set(turn.versions[:most])) > 1 else 0
            for turn, most in zip(self.turns, self._known_lengths, strict=True)
        ]
        some = [
            replace(turn, tokens=turn.tokens[:length], versions=turn.versions[:length])
            for turn, length in zip(self.turns, lengths, strict=True)
            if length
        ]
        if some:
            out_N[self._firsts(lengths)] = self.lab.carried(some)
        return out_N

    @cached_property
    def retrained_N(self) -> Tensor | None:
        """The trainer's logprobs computed once more, if the weights that it trained are on disk."""
        if self.trained_version not in self.lab.versions:
            return None
        return self._at(self.trained_version, self.declared)

    def predicted(self, suppose: Suppose) -> Tensor:
        """The engine's logprobs under a supposition.

        Where a version is not on disk, what the supposition changes is computed by the version nearest to it.
        """
        if suppose.weights is not None:
            out_N = torch.empty_like(self.engine_N)
            for version in sorted(set(suppose.weights.of.values())):
                versions = [recorded for recorded, other in suppose.weights.of.items() if other == version]
                here_N = torch.isin(self._version_N, torch.tensor(versions))
                out_N[here_N] = self._at(version, suppose)[here_N]
            return out_N
        if suppose == self.declared:
            return self.anchor_N
        return self.anchor_N + self._logprobs_by(suppose) - self._logprobs_by(self.declared)

    def changes(self, suppose: Suppose) -> Iterator[Suppose]:
        """Every supposition that differs in one more thing from the declared ones."""
        if suppose.transform == DECLARED:
            yield from (replace(suppose, transform=other) for other in self.transforms)
        if suppose.precision == self.lab.own:
            yield from (replace(suppose, precision=other) for other in self.lab.precisions)
        if suppose.weights is None and bool(self.known_N.any()):
            yield from (replace(suppose, weights=other) for other in self._others())
        if not suppose.anew and any(ids != turn.prompt for ids, turn in zip(self._anew, self.turns, strict=True)):
            yield replace(suppose, anew=True)

    def _others(self) -> Iterator[Instead]:
        newest = max(self.versions)
        ranked = sorted((v for v in self.lab.versions if v), key=lambda v: (abs(v - newest), v))
        seen: list[Mapping[int, int]] = [{version: version for version in self.versions}]
        for version in sorted({0, *ranked[: _OTHERS + 1]}):
            of: Mapping[int, int] = dict.fromkeys(self.versions, version)
            if of not in seen:
                seen.append(of)
                yield Instead(name=f"version {version}", of=of)
        for behind in range(1, _OTHERS):
            of = {version: version - behind for version in self.versions}
            if set(of.values()) <= set(self.lab.versions) and of not in seen:
                seen.append(of)
                yield Instead(name=f"the version {behind} before the stamped one", of=of)

    def noise(self, precision: Precision) -> float:
        """Root mean square of what another precision changes in these logprobs."""
        other_N = self._logprobs_by(replace(self.declared, precision=precision))
        return rms(other_N - self._logprobs_by(self.declared))

    @cached_property
    def allowed(self) -> float:
        """Gap (root mean square) that the run's own type explains: two sides round, and kernels differ."""
        return 3 * math.hypot(math.sqrt(2) * self.noise(self.lab.wider), RECORDED)

    def _logprobs_by(self, suppose: Suppose) -> Tensor:
        """By the weights that stand in for the stamped ones."""
        out_N = torch.empty_like(self.engine_N)
        for version in sorted(set(self.stand_in.values())):
            versions = [recorded for recorded, other in self.stand_in.items() if other == version]
            here_N = torch.isin(self._version_N, torch.tensor(versions))
            out_N[here_N] = self._at(version, suppose)[here_N]
        return out_N

    def _at(self, version: int, suppose: Suppose) -> Tensor:
        """By one version's weights; every way to compute the head comes from one pass of the layers."""
        body = suppose.precision.body
        key = (version, body, suppose.anew)
        if key not in self._tables:
            known = (self.lab.own, self.lab.wider, *self.lab.precisions)
            heads = dict.fromkeys(precision.head for precision in known if precision.body == body)
            ways = [(head, transform) for head in heads for transform in (DECLARED, *self.transforms)]
            prompts = self._anew if suppose.anew else [turn.prompt for turn in self.turns]
            self._tables[key] = self.lab.logprobs(self.turns, prompts, version, body, ways)
        return self._tables[key][suppose.precision.head, suppose.transform]


def rms(values_N: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return float(values_N.square().mean().sqrt()) if values_N.numel() else 0.0


def _transforms(turns: Sequence[RecordedTurn], sampling: Sampling) -> Iterator[Transform]:
    """What an engine may leave out, one of those that come to the same."""
    heated = any(turn.temperature != 1.0 for turn in turns)
    limited = _used(top_p=(sampling.top_p, 1.0), top_k=(sampling.top_k, 0), min_p=(sampling.min_p, 0.0))
    penalised = _used(
        repetition_penalty=(sampling.repetition_penalty, 1.0),
        presence_penalty=(sampling.presence_penalty, 0.0),
        frequency_penalty=(sampling.frequency_penalty, 0.0),
        min_tokens=(sampling.min_tokens, 0),
    )
    if heated:
        yield Transform(name="temperature not applied", temperature=False)
    if limited:
        yield Transform(name=f"{limited} not renormalised", support=False)
    if penalised:
        yield Transform(name=f"{penalised} not applied", penalties=False)
    if bool(heated) + bool(limited) + bool(penalised) > 1:
        yield Transform(name="raw logprobs", temperature=False, support=False, penalties=False)


def _used(**options: tuple[float, float]) -> str:
    """Options that have another value than the neutral one, in words."""
    return " and ".join(f"{name} {value:g}" for name, (value, neutral) in options.items() if value != neutral)


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
        category, name, advice = _named(evidence, current, suppose)
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
            # rounding brings the two nearer, whichever rounded.
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


def _named(evidence: Evidence, before: Suppose, suppose: Suppose) -> tuple[Category, str, str]:
    """Category, name and advice of the one thing that a supposition adds."""
    if suppose.transform != before.transform:
        also = " (raw logprobs)" if not suppose.transform.temperature and suppose.transform.support else ""
        return (
            "sampling",
            f"{suppose.transform.name}{also}",
            "let the engine tell logprobs of the distribution it draws from (vLLM: logprobs_mode processed_logprobs)",
        )
    if suppose.weights != before.weights and suppose.weights is not None:
        versions = ", ".join(map(str, sorted(evidence.versions)))
        return (
            "staleness",
            f"the engine sampled from {suppose.weights.name}, stamped {versions}",
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
        missing = ", ".join(str(v) for v in sorted(evidence.versions) if v not in evidence.lab.versions)
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
