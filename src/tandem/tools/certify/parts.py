"""Every part of a step by itself against its formula, so that what is wrong has a name.

Each is given what the formulas say that the parts before it should have made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.losses.base import MicroBatch
from tandem.tools.certify import formulas
from tandem.tools.certify.formulas import Formula, SampledSequence, Scored
from tandem.tools.certify.gradients import CertifiedPolicy
from tandem.tools.certify.plain import PlainModel
from tandem.trainer.objective import Objective, OldLogprobs
from tandem.trainer.pack import StepBatch
from tandem.types import Group

Key = tuple[str, tuple[int, ...]]
"""Of a trained sequence: its rollout and its sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartError:
    """Distance of a part from its formula."""

    name: str
    """Of the part."""
    figure: float
    """The distance."""
    rounding: Literal["none", "float32", "difference"] = "float32"
    """What it may be off by: none, of a count; float32; or what that is of a difference of logprobs nearly alike."""
    note: str = ""
    """What else is to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Values of the formulas for the first step."""

    sequences: Mapping[Key, SampledSequence]
    """All that are trained."""
    scored: Mapping[Key, Scored]
    """Their logprobs as the step begins."""
    moved: Mapping[Key, Tensor]
    """Their logprobs after the first update."""


def expected(exact: PlainModel, trained: formulas.Trained, groups: Sequence[Group], known: Formula) -> Expected:
    """By the formulas alone."""
    sequences = {_key(one): one for one in formulas.spoken(groups, known)}

    @torch.no_grad()
    def logprobs() -> list[Tensor]:
        return [formulas.logprobs(exact, one, known) for one in sequences.values()]

    exact.put(exact.held(trained(-1)))
    loaded = logprobs() if known.reference is not None else [None] * len(sequences)
    exact.put(exact.held(trained(0)))
    first = logprobs()
    exact.put(exact.held(trained(1)))
    scored = {
        key: Scored(now=one, first=one, reference=before)
        for key, one, before in zip(sequences, first, loaded, strict=True)
    }
    return Expected(sequences=sequences, scored=scored, moved=dict(zip(sequences, logprobs(), strict=True)))


def findings(live: CertifiedPolicy, batch: StepBatch, wanted: Expected, known: Formula) -> Iterator[PartError]:
    """Every part in the order that a step has them."""
    scored = live.scored(batch)
    packed: dict[Key, dict[str, Tensor]] = {}
    for micro, now_N, reference_N in scored:
        values = {"targets": micro.targets_N, "advantages": micro.batch.advantages_N, "weights": micro.weights_N}
        values |= {"told": micro.batch.behavior_logprobs_N, "now": now_N}
        values |= {} if reference_N is None else {"reference": reference_N}
        at = 0
        for rollout, count in micro.places:
            if count:
                one = {name: value_N[at : at + count] for name, value_N in values.items()}
                packed[rollout, tuple(one["targets"].tolist())] = one
            at += count
    # What has no advantage has no gradient, and need not be computed where nothing else has one.
    needed = {k for k, one in wanted.sequences.items() if known.reference is not None or any(one.advantages)}
    wrong = (needed - packed.keys()) | (packed.keys() - wanted.sequences.keys())
    tokens = sum(len(tokens) for _, tokens in wrong)
    yield PartError(
        name="tokens that are trained",
        figure=float(tokens),
        rounding="none",
        note=f"first of {sorted(wrong)[0][0]}" if wrong else "",
    )
    both = [key for key in packed if key in wanted.sequences]
    sequences = list(wanted.sequences.values())

    def compared(name: str, part: str, formula: Callable[[Key], Tensor]) -> PartError:
        figure = apart([packed[key][part] for key in both], [formula(key) for key in both])
        return PartError(name=name, figure=figure)

    yield compared("advantages", "advantages", lambda key: _float64(wanted.sequences[key].advantages))
    yield compared(
        "what each token counts",
        "weights",
        lambda key: torch.full((len(key[1]),), formulas.share(known, sequences, wanted.sequences[key])).double(),
    )
    yield compared("logprobs of the policy", "now", lambda key: wanted.scored[key].now)
    if known.reference is not None:
        yield compared("logprobs of the reference", "reference", lambda key: _required(wanted.scored[key].reference))
    yield from _costs(live.setup.objective, wanted, known)


def _costs(objective: Objective, wanted: Expected, known: Formula) -> Iterator[PartError]:
    """Loss, corrections and penalty, each alone, after an update: there every ratio is another."""
    sequences = list(wanted.sequences.values())
    sampler = _float64(value for one in sequences for value in one.sampler_logprobs).float()
    micro = MicroBatch(
        behavior_logprobs_N=sampler,
        advantages_N=_float64(value for one in sequences for value in one.advantages).float(),
        sample_N=torch.cat([torch.full((len(one.at),), i) for i, one in enumerate(sequences)]),
        num_samples=len(sequences),
    )
    first_N = torch.cat([one.first for one in wanted.scored.values()]).float()
    has = known.reference is not None
    reference_N = torch.cat([_required(one.reference) for one in wanted.scored.values()]).float() if has else None
    micro = objective.informed(micro, OldLogprobs(recomputed_logprobs_N=first_N, ref_logprobs_N=reference_N))
    now_N = torch.cat(list(wanted.moved.values())).float()

    def formula(of: Callable[[Formula, SampledSequence, Scored], Tensor]) -> list[Tensor]:
        values = []
        for key, one in wanted.sequences.items():
            now = wanted.moved[key].clone().requires_grad_()
            before = wanted.scored[key]
            values += _with_slope(of(known, one, Scored(now=now, first=before.first, reference=before.reference)), now)
        return values

    def finding(name: str, part: Callable[[Tensor], Tensor], of: Callable[..., Tensor]) -> PartError:
        leaf_N = now_N.clone().requires_grad_()
        each = [values.split([len(one.at) for one in sequences]) for values in _with_slope(part(leaf_N), leaf_N)]
        numbers = [value for pair in zip(*each, strict=True) for value in pair]
        return PartError(name=name, figure=apart(numbers, formula(of)))

    yield finding("loss of each token", lambda now: objective.loss(now, micro).loss_N, formulas.loss)
    if objective.corrections:
        yield finding("corrections", lambda now: objective.weights(now.detach(), micro)[0], formulas.weights)
    if objective.reference is not None:
        kept = objective.reference
        penalty = finding(
            "penalty of each token", lambda now: kept.beta * kept.divergence(now, micro)[0], formulas.penalty
        )
        yield replace(penalty, rounding="difference")


def _with_slope(values: Tensor, by: Tensor) -> list[Tensor]:
    """Values, and the gradient of their sum."""
    if not values.requires_grad:
        return [values, torch.zeros_like(by)]
    (slope,) = torch.autograd.grad(values.sum(), by, materialize_grads=True)
    return [values.detach(), slope]


def apart(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what is wanted; the first alone where that is 0."""
    if not wanted:
        return 0.0
    one, other = torch.cat([value.double() for value in actual]), torch.cat([value.double() for value in wanted])
    return float((one - other).norm()) / (float(other.norm()) or 1.0)


def _key(one: SampledSequence) -> Key:
    return one.rollout, tuple(one.ids[at] for at in one.at)


def _float64(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _required(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
