"""The objective once more, as plainly as it can be written: float64, one sequence at a time, full logits, no packing.

Nothing here is shared with what trains: neither layers, losses, advantages, corrections, references nor packing are
imported, and the recipe is read as plain data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.tools.certify.baselines import ADVANTAGES
from tandem.tools.certify.costs import CORRECTIONS, LOSSES, Scored, cost
from tandem.tools.certify.formula import Formula, Options, Spoken
from tandem.tools.certify.plain import Exact
from tandem.types import Group, Rollout

Trained = Callable[[int], Mapping[str, Tensor]]
"""What is trained, by name: before the run (-1), as its first step began (0), after the first update (1), and so on."""

REFERENCES = ("start", "average")
"""Kinds of references that are known here."""


def unknown(known: Formula) -> list[str]:
    """Parts that no formula is known for."""
    asked = [("advantage", known.advantage[0], ADVANTAGES), ("loss", known.loss[0], LOSSES)]
    asked += [("correction", kind, CORRECTIONS) for kind, _ in known.corrections]
    found = [f"{what} {kind}" for what, kind, formulas in asked if kind not in formulas]
    if known.reference is not None and known.reference[0] not in REFERENCES:
        found.append(f"reference {known.reference[0]}")
    return found


def gradients(
    exact: Exact, trained: Trained, steps: Sequence[tuple[int, Sequence[Group]]], known: Formula
) -> list[dict[str, Tensor]]:
    """The objective's gradient by parameter name, float64, for every update of some steps.

    Args:
        exact: the model.
        trained: its weights.
        steps: the number of each step in its run, from 1, and what it is trained on.
        known: the recipe.
    """
    held: Mapping[str, Tensor] = exact.held(trained(-1))
    found: list[dict[str, Tensor]] = []
    for number, groups in steps:
        sequences = list(spoken(groups, known))
        before = _before(exact, held, sequences, known)
        first: list[Tensor] = []
        for update in range(known.updates):
            exact.take(trained(len(found)))
            for i, (sequence, reference) in enumerate(zip(sequences, before, strict=True)):
                now = logprobs(exact, sequence, known)
                if update == 0:
                    first.append(now.detach())
                weight = share(known, sequences, sequence)
                scored = Scored(now=now, first=first[i], reference=reference)
                (cost(known, sequence, scored).sum() * weight).backward()
            found.append(exact.gradients())
        held = _followed(held, exact.held(trained(len(found))), number, known)
    return found


def _before(
    exact: Exact, held: Mapping[str, Tensor], sequences: Sequence[Spoken], known: Formula
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


def spoken(groups: Sequence[Group], known: Formula) -> Iterator[Spoken]:
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


def _sequences(rollout: Rollout, advantage: float) -> Iterator[Spoken]:
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
        told: list[float] = []
        advantages: list[float] = []
        for i in run:
            start, count = len(turns[i].prompt), len(turns[i].completion.tokens)
            at += range(start, start + count)
            begins += [start] * count
            told += turns[i].completion.logprobs
            advantages += [advantage] * count if own is None else own[place : place + count]
            place += count
        end = turns[run[-1]]
        yield Spoken(
            rollout=rollout.id,
            ids=end.prompt + end.completion.tokens,
            at=tuple(at),
            begins=tuple(begins),
            told=tuple(told),
            advantages=tuple(advantages),
            temperature=end.temperature,
        )


def logprobs(exact: Exact, sequence: Spoken, known: Formula) -> Tensor:
    """Of every sampled token: penalised, at its temperature, and within the support that it was sampled from."""
    logits, rows = exact.logits(sequence.ids), []
    for at, begin in zip(sequence.at, sequence.begins, strict=True):
        token = sequence.ids[at]
        row = _penalised(logits[at - 1], sequence.ids[:begin], sequence.ids[begin:at], known.sampling)
        row = row / sequence.temperature
        early = at - begin < known.sampling["min_tokens"]
        possible = row.detach().clone()
        possible[list(known.ends if early else ())] = -math.inf
        allowed = torch.full_like(possible, -math.inf)
        allowed[[*_support(possible, known.sampling), token]] = 0.0
        rows.append((row + allowed).log_softmax(-1)[token])
    return torch.stack(rows)


def _penalised(row: Tensor, prompt: Sequence[int], answer: Sequence[int], sampling: Options) -> Tensor:
    """Logits with what tokens before do to them."""
    scale, less = torch.ones_like(row, requires_grad=False), torch.zeros_like(row, requires_grad=False)
    seen = list({*prompt, *answer})
    scale[seen] = sampling["repetition_penalty"] ** torch.where(row[seen] > 0, -1.0, 1.0).double()
    for token, count in Counter(answer).items():
        less[token] = sampling["frequency_penalty"] * count + sampling["presence_penalty"]
    return row * scale - less


def _support(row: Tensor, sampling: Options) -> list[int]:
    """Possible tokens that min_p leaves, then top_k, then top_p of what is left."""
    probabilities, order = row.softmax(-1).sort(descending=True)
    least = sampling["min_p"] * probabilities[0]
    number = int(((probabilities >= least) & (probabilities > 0)).sum())
    if sampling["top_k"]:
        number = min(number, sampling["top_k"])
    if sampling["top_p"] < 1:
        mass = probabilities[:number].cumsum(0)
        number = 1 + int((mass[:-1] < sampling["top_p"] * mass[-1]).sum())
    return order[:number].tolist()


def share(known: Formula, sequences: Sequence[Spoken], one: Spoken) -> float:
    """What each token of a sequence counts in its step."""
    reduction = known.loss[1]["reduction"]
    if reduction == "token":
        return 1 / sum(len(s.at) for s in sequences)
    length = len(one.at) if reduction == "sequence" else known.sampling["max_tokens"]
    return float(1 / len(sequences) / length)
