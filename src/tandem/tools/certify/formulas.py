"""The objective in float64, as plainly as it can be written: one sequence at a time, full logits, no packing.

Nothing here is shared with what trains: neither layers, losses, advantages, corrections, references nor packing are
imported, and the recipe is read as plain data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev

import torch
from torch import Tensor

from tandem.tools.certify.plain import Options, PlainModel
from tandem.types import UNKNOWN_LOGPROB, Group, Json, Rollout

Weights = Mapping[str, Mapping[str, float]]
"""Of each reward, by environment and by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The objective of a recipe, as plain options."""

    advantage: tuple[str, Options]
    """Kind and options."""
    loss: tuple[str, Options]
    """Kind and options."""
    corrections: tuple[tuple[str, Options], ...]
    """Kinds and options."""
    reference: tuple[str, Options] | None
    """Kind and options: beta, estimator, ratio_corrected, and those of its kind."""
    recomputed: bool
    """Ratios are against the policy as the step began."""
    updates: int
    """On the batch."""
    sampling: Options
    """Its limits, penalties and max_tokens are read."""
    ends: tuple[int, ...]
    """Token ids that end an answer."""
    mask_truncated: bool
    """Leave out answers that were cut."""
    weights: Weights
    """Of the rewards."""


def formula(recipe: Mapping[str, Json], weights: Weights, ends: Iterable[int]) -> Formula:
    """Read a recipe that was made plain; ``ends`` are the model's own end tokens."""
    reference = recipe.get("reference")
    return Formula(
        advantage=part(recipe["advantage"]),
        loss=part(recipe["loss"]),
        corrections=tuple(map(part, recipe["corrections"])),
        reference=None if reference is None else part(reference),
        recomputed=recipe["old_logprobs"] == "recomputed",
        updates=recipe["updates_per_batch"],
        sampling=recipe["sampling"],
        ends=(*ends, *recipe["sampling"]["stop_token_ids"]),
        mask_truncated=recipe["truncated"] == "mask",
        weights=weights,
    )


def part(plain: Json) -> tuple[str, Options]:
    """Kind and options of a part that was made plain."""
    return (plain, {}) if isinstance(plain, str) else (plain["kind"], plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sequence with sampled tokens in it."""

    rollout: str
    """Id of the rollout that it is of, or is part of."""
    ids: tuple[int, ...]
    """All tokens."""
    at: tuple[int, ...]
    """Which of them were sampled."""
    begins: tuple[int, ...]
    """Where the answer begins that each of these is in."""
    sampler_logprobs: tuple[float, ...]
    """The sampler's logprob of each of these."""
    advantages: tuple[float, ...]
    """Of each of these."""
    temperature: float
    """At which they were sampled."""


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
            rewards = [part[name] for part in parts if name in part]
            for i, part in enumerate(parts):
                if name in part:
                    scaled = (part[name] - fmean(rewards)) / (_spread(rewards) + options["eps"])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Logprobs of a sequence's sampled tokens, float64."""

    now: Tensor
    """The policy's; costs are differentiable in them."""
    first: Tensor
    """The policy's as the step began."""
    reference: Tensor | None
    """The reference's."""


def cost(known: Formula, sequence: SampledSequence, scored: Scored) -> Tensor:
    """Loss of each sampled token of a sequence."""
    total, weight = loss(known, sequence, scored), weights(known, sequence, scored)
    total = torch.where(weight == 0, 0.0, total * weight)
    return total if known.reference is None else total + penalty(known, sequence, scored)


def loss(known: Formula, sequence: SampledSequence, scored: Scored) -> Tensor:
    """Of the loss alone."""
    kind, options = known.loss
    advantages = torch.tensor(sequence.advantages, dtype=torch.float64)
    return LOSSES[kind](scored.now, _old(known, sequence, scored), advantages, options)


def weights(known: Formula, sequence: SampledSequence, scored: Scored) -> Tensor:
    """Weight of each token: the product of all corrections' weights."""
    sampler, advantages = _sampler_logprobs(sequence, scored), torch.tensor(sequence.advantages, dtype=torch.float64)
    now = scored.now.detach()
    total = torch.ones_like(now)
    for kind, options in known.corrections:
        gap = now - sampler if kind == "opsm" or not known.recomputed else scored.first - sampler
        total = total * CORRECTIONS[kind](gap, advantages, options, known.recomputed)
    return total


def penalty(known: Formula, sequence: SampledSequence, scored: Scored) -> Tensor:
    """Of leaving the reference; there is one."""
    assert known.reference is not None
    assert scored.reference is not None
    options = known.reference[1]
    ratio = (scored.now - _old(known, sequence, scored)).exp()
    whole: Tensor = options["beta"] * _penalty(scored.now - scored.reference, ratio, options)
    return whole


def _sampler_logprobs(sequence: SampledSequence, scored: Scored) -> Tensor:
    """The sampler's, or the policy's where it told none."""
    logprobs = torch.tensor(sequence.sampler_logprobs, dtype=torch.float64)
    return torch.where(logprobs == UNKNOWN_LOGPROB, scored.first, logprobs)


def _old(known: Formula, sequence: SampledSequence, scored: Scored) -> Tensor:
    """What ratios are against."""
    return scored.first if known.recomputed else _sampler_logprobs(sequence, scored)


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


Trained = Callable[[int], Mapping[str, Tensor]]
"""What is trained, by name: before the run (-1), as its first step began (0), after the first update (1), and so on."""

REFERENCES = ("start", "average")
"""Kinds of references that are known here."""


def unknown(known: Formula) -> list[str]:
    """Parts that no formula is known for."""
    parts = [("advantage", known.advantage[0], ADVANTAGES), ("loss", known.loss[0], LOSSES)]
    parts += [("correction", kind, CORRECTIONS) for kind, _ in known.corrections]
    names = [f"{what} {kind}" for what, kind, formulas in parts if kind not in formulas]
    if known.reference is not None and known.reference[0] not in REFERENCES:
        names.append(f"reference {known.reference[0]}")
    return names


def gradients(
    exact: PlainModel, trained: Trained, steps: Sequence[tuple[int, Sequence[Group]]], known: Formula
) -> list[dict[str, Tensor]]:
    """The objective's gradient by parameter name, float64, for every update of some steps.

    Args:
        exact: the model.
        trained: its weights.
        steps: the number of each step in its run, from 1, and what it is trained on.
        known: the recipe.
    """
    held: Mapping[str, Tensor] = exact.held(trained(-1))
    updates: list[dict[str, Tensor]] = []
    for number, groups in steps:
        sequences = list(spoken(groups, known))
        before = _before(exact, held, sequences, known)
        first: list[Tensor] = []
        for update in range(known.updates):
            exact.take(trained(len(updates)))
            for i, (sequence, reference) in enumerate(zip(sequences, before, strict=True)):
                now = logprobs(exact, sequence, known)
                if update == 0:
                    first.append(now.detach())
                weight = share(known, sequences, sequence)
                scored = Scored(now=now, first=first[i], reference=reference)
                (cost(known, sequence, scored).sum() * weight).backward()
            updates.append(exact.gradients())
        held = _followed(held, exact.held(trained(len(updates))), number, known)
    return updates


def _before(
    exact: PlainModel, held: Mapping[str, Tensor], sequences: Sequence[SampledSequence], known: Formula
) -> Sequence[Tensor | None]:
    """The reference's logprobs of each sequence."""
    if known.reference is None:
        return [None] * len(sequences)
    exact.put(held)
    with torch.no_grad():
        return [logprobs(exact, sequence, known) for sequence in sequences]


def _followed(held: Mapping[str, Tensor], now: Mapping[str, Tensor], step: int, known: Formula) -> Mapping[str, Tensor]:
    """The reference's weights after a step."""
    if known.reference is None or known.reference[0] != "average" or step % known.reference[1]["every"]:
        return held
    mixup = known.reference[1]["mixup"]
    return {name: (1 - mixup) * before + mixup * now[name] for name, before in held.items()}


def spoken(groups: Sequence[Group], known: Formula) -> Iterator[SampledSequence]:
    """Every sequence that is trained."""
    kind, options = known.advantage
    values = ADVANTAGES[kind]([[r for r in group.rollouts if _counts(r)] for group in groups], options, known.weights)
    for group, advantages in zip(groups, values, strict=True):
        for rollout, value in zip(filter(_counts, group.rollouts), advantages, strict=True):
            cut = rollout.turns[-1].completion.finish == "length"
            if rollout.trained and not (known.mask_truncated and cut):
                yield from _sequences(rollout, value)


def _counts(rollout: Rollout) -> bool:
    return rollout.reward is not None and any(turn.completion.tokens for turn in rollout.turns)


def _sequences(rollout: Rollout, advantage: float) -> Iterator[SampledSequence]:
    """A turn that repeats all before it, at the same temperature, goes on in the same sequence."""
    runs: list[list[int]] = []
    turns, place, own = [turn for turn in rollout.turns if turn.completion.tokens], 0, rollout.advantages
    for i, turn in enumerate(turns):
        last = turns[runs[-1][-1]] if runs else None
        whole = () if last is None else last.prompt + last.completion.tokens
        goes_on = last is not None and turn.prompt[: len(whole)] == whole and turn.temperature == last.temperature
        runs = [*runs[:-1], [*runs[-1], i]] if goes_on else [*runs, [i]]
    for run in runs:
        at: list[int] = []
        begins: list[int] = []
        sampler_logprobs: list[float] = []
        advantages: list[float] = []
        for i in run:
            start, count = len(turns[i].prompt), len(turns[i].completion.tokens)
            at += range(start, start + count)
            begins += [start] * count
            sampler_logprobs += turns[i].completion.logprobs
            advantages += [advantage] * count if own is None else own[place : place + count]
            place += count
        end = turns[run[-1]]
        yield SampledSequence(
            rollout=rollout.id,
            ids=end.prompt + end.completion.tokens,
            at=tuple(at),
            begins=tuple(begins),
            sampler_logprobs=tuple(sampler_logprobs),
            advantages=tuple(advantages),
            temperature=end.temperature,
        )


def logprobs(exact: PlainModel, sequence: SampledSequence, known: Formula) -> Tensor:
    """Logprob of every sampled token: penalised, at its temperature, within the support that it was sampled from."""
    logits, rows = exact.logits(sequence.ids), []
    for at, begin in zip(sequence.at, sequence.begins, strict=True):
        token = sequence.ids[at]
        row = _penalised(logits[at - 1], sequence.ids[:begin], sequence.ids[begin:at], known.sampling)
        row = row / sequence.temperature
        early = at - begin < known.sampling["min_tokens"]
        possible = row.detach().clone()
        possible[list(known.ends if early else ())] = -math.inf
        allowed = torch.full_like(possible, -math.inf)
        allowed[_support(possible, known.sampling)] = allowed[token] = 0.0
        rows.append((row + allowed).log_softmax(-1)[token])
    return torch.stack(rows)


def _penalised(row: Tensor, prompt: Sequence[int], answer: Sequence[int], sampling: Options) -> Tensor:
    """Logits with what tokens before do to them."""
    if (sampling["repetition_penalty"], sampling["frequency_penalty"], sampling["presence_penalty"]) == (1, 0, 0):
        return row
    scale, less = torch.ones_like(row, requires_grad=False), torch.zeros_like(row, requires_grad=False)
    seen = list({*prompt, *answer})
    scale[seen] = sampling["repetition_penalty"] ** torch.where(row[seen] > 0, -1.0, 1.0).double()
    for token, count in Counter(answer).items():
        less[token] = sampling["frequency_penalty"] * count + sampling["presence_penalty"]
    return row * scale - less


def _support(row: Tensor, sampling: Options) -> Tensor:
    """Ids of the possible tokens that min_p leaves, then top_k, then top_p of what is left."""
    probabilities, order = row.softmax(-1).sort(descending=True)
    least = sampling["min_p"] * probabilities[0]
    number = int(((probabilities >= least) & (probabilities > 0)).sum())
    if sampling["top_k"]:
        number = min(number, sampling["top_k"])
    if sampling["top_p"] < 1:
        mass = probabilities[:number].cumsum(0)
        number = 1 + int((mass[:-1] < sampling["top_p"] * mass[-1]).sum())
    return order[:number]


def share(known: Formula, sequences: Sequence[SampledSequence], one: SampledSequence) -> float:
    """Share of each token of a sequence in its step's loss."""
    reduction = known.loss[1]["reduction"]
    if reduction == "token":
        return 1 / sum(len(s.at) for s in sequences)
    length = len(one.at) if reduction == "sequence" else known.sampling["max_tokens"]
    return float(1 / len(sequences) / length)
