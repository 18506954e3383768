"""What a sampled token costs, once more: losses, corrections and penalties as their papers have them, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.tools.certify.formula import Formula, Options, Spoken
from tandem.types import UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Logprobs of a sequence's sampled tokens, float64."""

    now: Tensor
    """The policy's; costs are differentiable in them."""
    first: Tensor
    """The policy's as the step began."""
    reference: Tensor | None
    """The reference's."""


def cost(known: Formula, sequence: Spoken, scored: Scored) -> Tensor:
    """What each sampled token of a sequence costs."""
    total, weight = loss(known, sequence, scored), weights(known, sequence, scored)
    total = torch.where(weight == 0, 0.0, total * weight)
    return total if known.reference is None else total + penalty(known, sequence, scored)


def loss(known: Formula, sequence: Spoken, scored: Scored) -> Tensor:
    """Of the loss alone."""
    kind, options = known.loss
    advantages = torch.tensor(sequence.advantages, dtype=torch.float64)
    return LOSSES[kind](scored.now, _old(known, sequence, scored), advantages, options)


def weights(known: Formula, sequence: Spoken, scored: Scored) -> Tensor:
    """What the corrections make of each token: the product of their weights."""
    told, advantages = _told(sequence, scored), torch.tensor(sequence.advantages, dtype=torch.float64)
    now = scored.now.detach()
    total = torch.ones_like(now)
    for kind, options in known.corrections:
        gap = now - told if kind == "opsm" or not known.recomputed else scored.first - told
        total = total * CORRECTIONS[kind](gap, advantages, options, known.recomputed)
    return total


def penalty(known: Formula, sequence: Spoken, scored: Scored) -> Tensor:
    """Of leaving the reference; there is one."""
    assert known.reference is not None
    assert scored.reference is not None
    options = known.reference[1]
    ratio = (scored.now - _old(known, sequence, scored)).exp()
    whole: Tensor = options["beta"] * _penalty(scored.now - scored.reference, ratio, options)
    return whole


def _told(sequence: Spoken, scored: Scored) -> Tensor:
    """The sampler's, or the policy's where it told none."""
    told = torch.tensor(sequence.told, dtype=torch.float64)
    return torch.where(told == UNKNOWN, scored.first, told)


def _old(known: Formula, sequence: Spoken, scored: Scored) -> Tensor:
    """What ratios are against."""
    return scored.first if known.recomputed else _told(sequence, scored)


def _penalty(gap: Tensor, ratio: Tensor, options: Options) -> Tensor:
    estimates = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}
    estimate = estimates[options["estimator"]]
    return ratio * estimate if options["ratio_corrected"] else estimate


def _clip(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    low, high = 1 - options["clip_low"], 1 + options["clip_high"]
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def _grpo(now: Tensor, old: Tensor, advantages: Tensor, options: Options) -> Tensor:
    objective = _clip((now - old).exp(), advantages, options)
    if options["dual_clip"] is not None:
        floored = torch.maximum(objective, options["dual_clip"] * advantages)
        objective = torch.where(advantages < 0, floored, objective)
    return -objective


def _gspo(now: Tensor, old: Tensor, advantages: Tensor, options: Options) -> Tensor:
    ratio = (now - old).mean().exp().expand_as(now)
    if options["gradient"] == "token":
        ratio = ratio.detach() * (now - now.detach()).exp()
    return -_clip(ratio, advantages, options)


def _cispo(now: Tensor, old: Tensor, advantages: Tensor, options: Options) -> Tensor:
    weight = (now.detach() - old).exp()
    weight[weight > options["cap"]] = options["cap"]
    return -weight * advantages * now


def _sapo(now: Tensor, old: Tensor, advantages: Tensor, options: Options) -> Tensor:
    sharp = torch.full_like(now, options["temperature_negative"], requires_grad=False)
    sharp[advantages > 0] = options["temperature_positive"]
    return -advantages * 4 / sharp / (1 + (-sharp * ((now - old).exp() - 1)).exp())


def _reinforce(now: Tensor, old: Tensor, advantages: Tensor, options: Options) -> Tensor:
    return -advantages * now


LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Options], Tensor]] = {
    "grpo": _grpo,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": _reinforce,
}
"""Cost of each token given the policy's logprobs, the old ones, advantages and options."""


def _bounds(options: Options) -> tuple[float, float]:
    return options["low"] or 0.0, math.inf if options["high"] is None else options["high"]


def _token(gap: Tensor, advantages: Tensor, options: Options, recomputed: bool) -> Tensor:
    low, high = _bounds(options)
    ratio = gap.exp()
    if options["beyond"] == "truncate":
        return ratio.clamp(low, high)
    kept = ((ratio >= low) & (ratio <= high)).double()
    return kept * ratio if recomputed else kept


def _sequence(gap: Tensor, advantages: Tensor, options: Options, recomputed: bool) -> Tensor:
    return _token(gap.sum(), advantages, options, recomputed).expand_as(gap)


def _geometric(gap: Tensor, advantages: Tensor, options: Options, recomputed: bool) -> Tensor:
    low, high = _bounds(options)
    return torch.full_like(gap, float(low <= gap.mean().exp() <= high))


def _opsm(gap: Tensor, advantages: Tensor, options: Options, recomputed: bool) -> Tensor:
    far = -gap.mean() > options["threshold"]
    return torch.where((advantages < 0) & far, 0.0, torch.ones_like(gap))


CORRECTIONS: Mapping[str, Callable[[Tensor, Tensor, Options, bool], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "geometric": _geometric,
    "opsm": _opsm,
}
"""Weight of each token given the policy's logprobs less the sampler's, advantages, options, and whether recomputed."""
