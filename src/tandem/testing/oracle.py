"""The objective and the optimizers in float64, as plainly as they can be written: one sequence at a time, no packing.

Nothing here is shared with what trains: neither layers, losses, advantages, corrections, references, packing nor
optimizers are imported, and the recipe is read as plain data. ``tandem certify`` and the tests hold those against it.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Any

import torch
from torch import Tensor, nn

from tandem.types import UNKNOWN_LOGPROB, Group, Json, Rollout

Options = Mapping[str, Json]
"""A part's options by name."""
Weights = Mapping[str, Mapping[str, float]]
"""Of each reward, by environment and by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The objective of a recipe."""

    recipe: Mapping[str, Json]
    """Made plain; of it is read how a step is computed."""
    ends: tuple[int, ...]
    """Token ids that end an answer."""
    weights: Weights
    """Of the rewards."""

    @property
    def reference(self) -> tuple[str, Options] | None:
        """Kind and options of one whose penalty is in the loss."""
        plain = self.recipe["reference"]
        return None if plain is None or plain["in_reward"] else part(plain)


def part(plain: Json) -> tuple[str, Options]:
    """Kind and options of a part that was made plain."""
    return (plain, {}) if isinstance(plain, str) else (plain["kind"], plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sequence with sampled tokens in it."""

    ids: tuple[int, ...]
    """All tokens."""
    at: tuple[int, ...]
    """Which of them were sampled."""
    begins: tuple[int, ...]
    """Where the answer begins that each of these is in."""
    temperature: float
    """At which they were sampled."""
    sampler_logprobs: tuple[float, ...] = ()
    """The sampler's logprob of each of these."""
    advantages: tuple[float, ...] = ()
    """Of each of these."""
    rollout: str = ""
    """Id of the rollout that it is of, or is part of."""


Siblings = Sequence[Rollout]
Values = list[list[float]]
OfRollout = float | list[float]


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
    centred = _dr_grpo(groups, options, weights)
    std = _spread([x for part in (_rewards(groups) if options["std_of"] == "rewards" else centred) for x in part])
    return [[v / (std + options["eps"]) for v in values] for values in centred]


def _turn_returns(groups: Sequence[Siblings], options: Options, weights: Weights) -> list[list[list[float]]]:
    """Of every turn: what is still to come, less what is for the siblings, or came last for those that have ended."""

    def to_come(rollout: Rollout) -> list[float]:
        rewards = [turn.reward or 0.0 for turn in rollout.turns if turn.completion.tokens]
        rewards[-1] += rollout.reward or 0.0
        return [sum(options["discount"] ** k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]

    def above(group: Values) -> Values:
        return [[r - fmean(other[min(t, len(other) - 1)] for other in group) for t, r in enumerate(of)] for of in group]

    return [above([to_come(rollout) for rollout in group]) for group in groups]


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


ADVANTAGES: Mapping[str, Callable[[Sequence[Siblings], Options, Weights], Sequence[Sequence[OfRollout]]]] = {
    "dr_grpo": _dr_grpo,
    "grpo": _standardised,
    "rloo": _rloo,
    "batch_std": _batch_std,
    "maxrl": _maxrl,
    "gdpo": _gdpo,
    "turn_returns": _turn_returns,
}
"""Advantage of every rollout that counts, or of each of its turns, given those of every group."""


def cost(known: Formula, sequence: SampledSequence, now: Tensor, first: Tensor, reference: Tensor | None) -> Tensor:
    """Loss of each sampled token of a sequence, weighed by corrections, and the penalty of leaving the reference.

    Args:
        known: the recipe.
        sequence: how it was sampled.
        now: the policy's logprobs, float64; costs are differentiable in them.
        first: the policy's as the step began.
        reference: the reference's.
    """
    advantages = torch.tensor(sequence.advantages, dtype=torch.float64)
    recorded = torch.tensor(sequence.sampler_logprobs, dtype=torch.float64)
    sampler = torch.where(recorded == UNKNOWN_LOGPROB, first, recorded)
    recomputed = known.recipe["old_logprobs"] == "recomputed"
    old = first if recomputed else sampler
    kind, options = part(known.recipe["loss"])
    total = LOSSES[kind](now, old, advantages, options)
    for kind, options in map(part, known.recipe["corrections"]):
        gap = now.detach() - sampler if kind == "opsm" or not recomputed else first - sampler
        weight = CORRECTIONS[kind](gap, advantages, options, recomputed)
        total = torch.where(weight == 0, 0.0, total * weight)
    if known.reference is None:
        return total
    assert reference is not None
    options = known.reference[1]
    penalty = divergence(now - reference, (now - old).exp(), options)
    return total + float(options["beta"]) * penalty


def divergence(gap: Tensor, ratio: Tensor, options: Options) -> Tensor:
    """Estimate of each token's divergence from the reference, by the gap of logprobs and the ratio to the sampler."""
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
    recipe = known.recipe
    parts = [("advantage", recipe["advantage"], ADVANTAGES), ("loss", recipe["loss"], LOSSES)]
    parts += [("correction", plain, CORRECTIONS) for plain in recipe["corrections"]]
    names = [f"{what} {part(plain)[0]}" for what, plain, formulas in parts if part(plain)[0] not in formulas]
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
        for update in range(known.recipe["updates_per_batch"]):
            exact.take(trained(len(updates)))
            for i, (sequence, reference) in enumerate(zip(sequences, before, strict=True)):
                now = logprobs(exact, sequence, known)
                if update == 0:
                    first.append(now.detach())
                weight = share(known, sequences, sequence)
                (cost(known, sequence, now, first[i], reference).sum() * weight).backward()
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
    kind, options = part(known.recipe["advantage"])
    values = ADVANTAGES[kind]([[r for r in group.rollouts if _counts(r)] for group in groups], options, known.weights)
    for group, advantages in zip(groups, values, strict=True):
        for rollout, value in zip(filter(_counts, group.rollouts), advantages, strict=True):
            cut = rollout.turns[-1].completion.finish == "length"
            if rollout.trained and not (cut and known.recipe["truncated"] == "mask"):
                yield from _sequences(rollout, value)


def _counts(rollout: Rollout) -> bool:
    return rollout.reward is not None and any(turn.completion.tokens for turn in rollout.turns)


def _sequences(rollout: Rollout, advantage: OfRollout) -> Iterator[SampledSequence]:
    """A turn that repeats all before it, at the same temperature, goes on in the same sequence."""
    turns, place = [turn for turn in rollout.turns if turn.completion.tokens], 0
    rows: list[tuple[int, int, float, float]] = []
    for i, turn in enumerate(turns):
        begin, logprobs, whole = len(turn.prompt), turn.completion.logprobs, turn.prompt + turn.completion.tokens
        of_turn = advantage[i] if isinstance(advantage, list) else advantage
        own, place = rollout.advantages, place + len(logprobs)
        advantages = [of_turn] * len(logprobs) if own is None else own[place - len(logprobs) : place]
        if turn.trained:
            rows += ((begin + k, begin, *row) for k, row in enumerate(zip(logprobs, advantages, strict=True)))
        after = turns[i + 1] if i + 1 < len(turns) else None
        if after and after.prompt[: len(whole)] == whole and after.temperature == turn.temperature:
            continue
        if rows:
            at, begins, sampler_logprobs, values = zip(*rows, strict=True)
            yield SampledSequence(
                rollout=rollout.id,
                ids=whole,
                at=at,
                begins=begins,
                sampler_logprobs=sampler_logprobs,
                advantages=values,
                temperature=turn.temperature,
            )
        rows = []


def logprobs(exact: PlainModel, sequence: SampledSequence, known: Formula) -> Tensor:
    """Logprob of every sampled token: penalised, at its temperature, within the support that it was sampled from."""
    logits, sampling, rows = exact.logits(sequence.ids), known.recipe["sampling"], []
    for at, begin in zip(sequence.at, sequence.begins, strict=True):
        token = sequence.ids[at]
        row = _penalised(logits[at - 1], sequence.ids[:begin], sequence.ids[begin:at], sampling)
        row = row / sequence.temperature
        early = at - begin < sampling["min_tokens"]
        possible = row.detach().clone()
        possible[list(known.ends if early else ())] = -math.inf
        allowed = torch.full_like(possible, -math.inf)
        allowed[_support(possible, sampling)] = allowed[token] = 0.0
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
    reduction = part(known.recipe["loss"])[1]["reduction"]
    if reduction == "token":
        return 1 / sum(len(s.at) for s in sequences)
    length = len(one.at) if reduction == "sequence" else known.recipe["sampling"]["max_tokens"]
    return float(1 / len(sequences) / length)


# The model


TRAINABLES = ("full", "lora")
"""Kinds of trainables that are known here."""


class PlainModel:
    """A float64 copy of a model before it was prepared for training, and its weights.

    Args:
        model: as it was loaded.
        trainable: kind and options of what is trained.
    """

    def __init__(self, model: nn.Module, trainable: tuple[str, Options]):
        self.model = copy.deepcopy(model).double().eval().requires_grad_(False)
        causal: Any = self.model
        causal.set_attn_implementation("sdpa" if causal._supports_sdpa else "eager")
        causal.set_experts_implementation("eager")  # products of experts by groups know no float64
        self.kind, options = trainable
        self._merged = bool(options.get("merged"))
        self._saved = self._apart(tuple(f".{end}" for end in options.get("modules_to_save", ())))
        self._parameters = dict(self.model.named_parameters())
        self._scale = 0.0
        if self.kind == "lora":
            self._scale = options["alpha"] / options["rank"] ** (0.5 if options["use_rslora"] else 1)
        self._factors = self._adapted(options) if self.kind == "lora" else {}
        wanted = options.get("layers")
        self._first = {name: self._parameters[name].detach().clone() for name in self._factors}
        seen = ("visual.", "vision_tower.", "multi_modal_projector.")  # a policy of text does not train what sees
        named = [name for name in self._parameters if not any(part in name for part in seen)]
        whole = [name for name in named if wanted is None or _layer(name) in wanted]
        adapters = {n for pair in self._factors.values() for n in pair} | set(self._saved.values())
        self.names = frozenset(adapters or whole)
        """Of what is trained, by the recipe."""
        self._leaves: dict[str, Tensor] = {}

    def _apart(self, ends: tuple[str, ...]) -> dict[str, str]:
        """Names of the weights of modules that are trained whole, each with PEFT's; what they were tied to stays.

        Merged, the modules themselves are trained, and what they are tied to.
        """
        saved, modules = {}, [(n, m) for n, m in self.model.named_modules() if f".{n}".endswith(ends)]
        if self._merged:
            wanted = {id(p) for _, module in modules for p in module.parameters()}
            return {name: name for name, p in self.model.named_parameters() if id(p) in wanted}
        for name, module in modules:
            self.model.set_submodule(name, copy.deepcopy(module))
            for key, _ in module.named_parameters():
                saved[f"{name}.{key}"] = f"base_model.model.{name}.modules_to_save.default.{key}"
        return saved

    def _adapted(self, options: Options) -> dict[str, tuple[str, str]]:
        """Names of the two factors of what is added, by that of the weight it is added to."""
        head, targets = self.model.get_output_embeddings(), options["target_modules"]  # type: ignore[operator]
        factors = {}
        for name, module in self.model.named_modules():
            if isinstance(targets, str):
                named = targets == "all-linear" or re.fullmatch(targets, name) is not None
            else:
                named = any(f".{name}".endswith(f".{end}") for end in targets)
            within = options["layers"] is None or _layer(name) in options["layers"]
            if isinstance(module, nn.Linear) and module is not head and named and within:
                a, b = f"{name}.lora_A", f"{name}.lora_B"
                peft = [f"base_model.model.{factor}.default.weight" for factor in (a, b)]
                factors[f"{name}.weight"] = (a, b) if self._merged else (peft[0], peft[1])
            ends = tuple(f".{end}" for end in options["target_parameters"])
            stacks = [key for key, p in module.named_parameters(recurse=False) if p.dim() == 3]
            stacks = [key for key in stacks if within and f".{name}.{key}".endswith(ends)]
            for depth, key in enumerate(reversed(stacks)):  # PEFT wraps what it has wrapped for the one before
                wrapped = f"base_model.model.{name}{'.base_layer' * depth}"
                a, b = (f"{wrapped}.lora_{factor}.default.weight" for factor in "AB")
                merged = f"{name}.merged.{key}.lora_A", f"{name}.merged.{key}.lora_B"
                factors[f"{name}.{key}"] = merged if self._merged else (a, b)
        return factors

    def _added(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """What an adapter adds to a weight: B A, or that of each expert, whose weights some have the other way around.

        PEFT has the experts' A above each other, (E R, I), and their B's columns side by side, (O, R E).
        """
        weight = self._first[name]
        if weight.dim() == 2:
            return b @ a
        experts = len(weight)
        product = torch.einsum("ore,eri->eoi", b.view(len(b), -1, experts), a.view(experts, -1, a.shape[1]))
        owner = self.model.get_submodule(name.rpartition(".")[0])
        return product.transpose(1, 2) if getattr(owner, "is_transposed", False) else product

    def weights(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model computes with, by its own names, differentiable; ``trained`` by the names of the policy."""
        if not self._factors:
            return {name: trained[name].double() for name in self.names & trained.keys()}
        whole = {name: trained[theirs].double() for name, theirs in self._saved.items() if theirs in trained}
        return whole | {
            name: self._first[name] + self._scale * self._added(name, trained[a].double(), trained[b].double())
            for name, (a, b) in self._factors.items()
            if {a, b} <= trained.keys()
        }

    def held(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a reference keeps of it: a merged adapter's sums, else what is trained."""
        if self._merged:
            return self.weights(trained)
        return {name: value.double() for name, value in trained.items()}

    @torch.no_grad()
    def put(self, held: Mapping[str, Tensor]) -> None:
        """Compute with what a reference keeps."""
        self._write(held if self._merged else self.weights(held))

    def take(self, trained: Mapping[str, Tensor]) -> None:
        """Compute with these, and note their gradient."""
        self._leaves = {
            name: trained[name].detach().double().clone().requires_grad_() for name in self.names & trained.keys()
        }
        with torch.no_grad():
            self._write(self.weights(self._leaves))
        for name in self.weights(self._leaves):
            self._parameters[name].requires_grad_().grad = None

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._parameters[name].copy_(weight)

    def gradients(self) -> dict[str, Tensor]:
        """Of what was backpropagated since ``take``, by the names of what is trained."""
        weights = self.weights(self._leaves)
        torch.autograd.backward(list(weights.values()), [_slope(self._parameters[name]).double() for name in weights])
        return {name: _slope(self._leaves.get(name, torch.zeros(()))) for name in sorted(self.names)}

    def logits(self, ids: Sequence[int]) -> Tensor:
        """All logits of one sequence, (tokens, vocabulary), float64 and differentiable."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits.double()


def _slope(of: Tensor) -> Tensor:
    """A gradient; 0 where there is none."""
    return torch.zeros_like(of) if of.grad is None else of.grad


def _layer(name: str) -> int | None:
    """The number of the layer that a weight is in."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


# Optimizers


BLOCK = 256
"""Numbers of an 8-bit moment that share a scale."""
FLOATS = 4096
"""Smaller weights have moments in float32, whatever others have."""
ZERO = 1e-300
"""Stands where a zero is divided by."""


def rate(options: Options, step: int, total: int) -> float:
    """Learning rate of a step of so many: a linear rise, then constant or down along a line or half a cosine.

    Of warmup_stable_decay the rise begins at the lowest rate, and it is constant between the rise and the decay.
    """
    peak, rise, low, schedule = (options[name] for name in ("lr", "warmup_steps", "min_lr_ratio", "schedule"))
    stays = schedule == "warmup_stable_decay"
    if step <= rise:
        return float(peak * (low + (1 - low) * step / rise) if stays else peak * step / rise)
    from_step = total - options["decay_steps"] if stays else rise
    done = max(0.0, min(1.0, (step - from_step) / max(1, total - from_step)))
    shapes = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "1-sqrt": 1 - done**0.5,
    }
    return float(peak * (low + (1 - low) * shapes[options["decay"] if stays else schedule]))


class ExactOptimizer:
    """A run's optimizer.

    Args:
        kind: its name.
        options: its options.
        steps: of the run.
    """

    def __init__(self, kind: str, options: Options, steps: int):
        self._rule, self._options, self._steps = OPTIMIZERS[kind], options, steps
        self._states: dict[str, State] = {}
        self._count = 0

    def update(self, step: int, gradients: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How far the next update moves every weight, at a step's rate, given where it is."""
        self._count += 1
        grads = {name: gradient.double() for name, gradient in gradients.items()}
        whole, most = math.sqrt(sum(float(g.square().sum()) for g in grads.values())), self._options["max_grad_norm"]
        clip = most / whole if 0 < most < whole else 1.0
        lr = rate(self._options, step, self._steps)
        return {
            name: self._rule(
                self._states.setdefault(name, {}), grad * clip, before[name].double(), lr, self._count, self._options
            )
            for name, grad in grads.items()
        }


State = dict[str, Tensor]


def _adamw(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    means = []
    for name, power, beta in (("mean", 1, options["beta1"]), ("square", 2, options["beta2"])):
        state[name] = beta * state.get(name, torch.zeros_like(gradient)) + (1 - beta) * gradient**power
        means.append(state[name] / (1 - beta**count))
    direction = means[0] / (means[1].sqrt() + options["eps"])
    move: Tensor = -lr * (direction + options["weight_decay"] * weight)
    return move


def _adamw8bit(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    move = _adamw(state, gradient, weight, lr, count, options)
    if weight.numel() >= FLOATS:
        state["mean"], state["square"] = _rounded(state["mean"], True), _rounded(state["square"], False)
    return move


def _rounded(moment: Tensor, signed: bool) -> Tensor:
    """To the nearest of a byte's 256 shares of the largest number of its block; a square never to 0."""
    book = _book(signed)
    flat = torch.cat([moment.flatten(), torch.zeros(-moment.numel() % BLOCK, dtype=moment.dtype)]).view(-1, BLOCK)
    scales = flat.abs().amax(1, keepdim=True)
    shares = flat / scales.clamp(min=ZERO)
    above = torch.searchsorted(book, shares.contiguous()).clamp(1, 255)
    nearer = (book[above] - shares).abs() < (shares - book[above - 1]).abs()
    at = torch.where(nearer, above, above - 1).clamp(min=0 if signed else 1)
    return (book[at] * scales).flatten()[: moment.numel()].view_as(moment)


def _book(signed: bool) -> Tensor:
    """Dynamic tree quantisation: 0, 1 and the middles of evenly cut decades, each cut in twice as many as the next."""
    values = [0.0, 1.0]
    for decade in range(7):
        cuts = 2**decade * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (2 * i + 1) / (2 * cuts)) * 10.0 ** (decade - 6) for i in range(cuts)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


def _adafactor(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    squares, share = gradient.square(), count ** options["beta2_decay"]
    kept = {"all": squares} if gradient.dim() < 2 else {"rows": squares.mean(-1), "columns": squares.mean(-2)}
    for name, value in kept.items():
        state[name] = (1 - share) * state.get(name, torch.zeros_like(value)) + share * value
    if gradient.dim() < 2:
        estimate = state["all"]
    else:
        rows, columns = state["rows"], state["columns"]
        estimate = rows[..., None] * columns[..., None, :] / rows.mean(-1)[..., None, None].clamp(min=ZERO)
    direction = torch.where(estimate > 0, gradient / estimate.clamp(min=ZERO).sqrt(), 0.0)
    direction = direction / max(1.0, _rms(direction) / options["clip_rms"])
    scale = max(options["scale_floor"], _rms(weight)) * min(lr, count**-0.5) if options["relative_rate"] else lr
    move: Tensor = -scale * direction - lr * options["weight_decay"] * weight
    return move


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean()))


OPTIMIZERS: Mapping[str, Callable[[State, Tensor, Tensor, float, int, Options], Tensor]] = {
    "adamw": _adamw,
    "adamw_cpu": _adamw,
    "adamw8bit": _adamw8bit,
    "adafactor": _adafactor,
}
"""How far a weight moves, given what is kept of it, its clipped gradient, itself, the rate, the count of its updates
from 1 and options."""
