"""What each supposition of how the engine computed would have it tell, token by token.

N counts the sampled tokens of the turns that are looked at, in order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tandem.rollout.template import Template
from tandem.tools.mismatch.recorded import Spoken
from tandem.tools.mismatch.tokenised import anew
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
    """How the engine may have come to its logprobs."""

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

    def __init__(self, turns: Sequence[Spoken], lab: Lab, template: Template, sampling: Sampling):
        """All turns are of one step."""
        self.turns = tuple(turns)
        self.lab = lab
        self.declared = Suppose(precision=lab.own)
        self.trained_version = turns[0].step - 1
        self.engine_N = torch.tensor([value for turn in turns for value in turn.engine], dtype=torch.float64)
        self.trainer_N = torch.tensor([value for turn in turns for value in turn.trainer], dtype=torch.float64)
        self.gap_N = self.trainer_N - self.engine_N
        self.stamped = Counter(version for turn in turns for version in turn.versions)
        self.stand_in = {version: self._nearest(version) for version in self.stamped}
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
    def _told(self) -> list[int]:
        """How many leading tokens of each turn were sampled by weights that are on disk, each no older than before."""
        told: list[int] = []
        for turn in self.turns:
            fine = (
                version in self.lab.versions and version >= before
                for before, version in zip((0, *turn.versions), turn.versions, strict=False)
            )
            told.append(len(list(itertools.takewhile(bool, fine))))
        return told

    @cached_property
    def exact_N(self) -> Tensor:
        """True where the weights that sampled a token, and those before it in its turn, are on disk."""
        told = zip(self.turns, self._told, strict=True)
        return torch.tensor([i < most for turn, most in told for i in range(len(turn.tokens))])

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
        return torch.where(self.exact_N, self._stamped(self.declared), self.trainer_N)

    @cached_property
    def anchor_N(self) -> Tensor:
        """What an engine without fault tells: as ``pure_N``, but on the keys and values that were cached before."""
        out_N = self.pure_N.clone()
        some = [
            replace(turn, tokens=turn.tokens[:most], versions=turn.versions[:most])
            for turn, most in zip(self.turns, self._told, strict=True)
            if len(set(turn.versions[:most])) > 1
        ]
        if some:
            told = {(turn.rollout, turn.turn): most for turn, most in zip(self.turns, self._told, strict=True)}
            names = {(turn.rollout, turn.turn) for turn in some}
            here_N = torch.tensor(
                [
                    (key := (turn.rollout, turn.turn)) in names and i < told[key]
                    for turn in self.turns
                    for i in range(len(turn.tokens))
                ]
            )
            out_N[here_N] = self.lab.carried(some)
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
                stamps = [stamp for stamp, other in suppose.weights.of.items() if other == version]
                here_N = torch.isin(self._version_N, torch.tensor(stamps))
                out_N[here_N] = self._at(version, suppose)[here_N]
            return out_N
        if suppose == self.declared:
            return self.anchor_N
        return self.anchor_N + self._stamped(suppose) - self._stamped(self.declared)

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
        newest = max(self.stamped)
        ranked = sorted((v for v in self.lab.versions if v), key=lambda v: (abs(v - newest), v))
        seen: list[Mapping[int, int]] = [{version: version for version in self.stamped}]
        for version in sorted({0, *ranked[: _OTHERS + 1]}):
            of: Mapping[int, int] = dict.fromkeys(self.stamped, version)
            if of not in seen:
                seen.append(of)
                yield Instead(name=f"version {version}", of=of)
        for behind in range(1, _OTHERS):
            of = {version: version - behind for version in self.stamped}
            if set(of.values()) <= set(self.lab.versions) and of not in seen:
                seen.append(of)
                yield Instead(name=f"the version {behind} before the stamped one", of=of)

    def noise(self, precision: Precision) -> float:
        """Root mean square of what another precision changes in these logprobs."""
        other_N = self._stamped(replace(self.declared, precision=precision))
        return rms(other_N - self._stamped(self.declared))

    @cached_property
    def allowed(self) -> float:
        """Gap (root mean square) that the run's own type explains: two sides round, and kernels differ."""
        return 3 * math.hypot(math.sqrt(2) * self.noise(self.lab.wider), RECORDED)

    def _stamped(self, suppose: Suppose) -> Tensor:
        """By the weights that stand in for the stamped ones."""
        out_N = torch.empty_like(self.engine_N)
        for version in sorted(set(self.stand_in.values())):
            stamps = [stamp for stamp, other in self.stand_in.items() if other == version]
            here_N = torch.isin(self._version_N, torch.tensor(stamps))
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


def _transforms(turns: Sequence[Spoken], sampling: Sampling) -> Iterator[Transform]:
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
