"""Packing: scored groups to micro-batches. The causal shift happens here and nowhere else.

Turns that continue one another become one sequence, a sample. What sequences of a group begin with in common, be it the
prompt of siblings or the history of a conversation, is computed once (``prefix_tree.py``); ``balance.py`` says which
sequences are computed together. The last token of a sequence predicts nothing that is trained, so it is never computed.

T counts the tokens computed in a micro-batch, N the trained tokens predicted by them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.algorithms.advantages.base import Advantage, ByTurn, Weighs, advantages, spread
from tandem.algorithms.losses.base import MicroBatch
from tandem.config.loading import RunConfig, only_by_advantage
from tandem.metrics import Histogram, Mean, Sum, Value
from tandem.model import packing, routing
from tandem.model.attention import Packed, sequential_positions
from tandem.model.penalties import Past, Penalties, TokenHistory, joined
from tandem.model.plans import moved
from tandem.model.policy import Policy
from tandem.model.routing import OWN, Routing
from tandem.trainer.balance import Balance, GroupSamples, rounds_of
from tandem.trainer.pairs import is_cut
from tandem.trainer.prefix_tree import Ints, PackedRow, PrefixTree
from tandem.types import Group, Rollout, Sample

WIDTHS_TO_EQUAL = 6
"""Context, in widths of the model, at which a token's attention costs as much as all else in its layer: 4 operations
for each token seen and each of w channels, against 2 for each of a layer's 12 w² weights."""


_FORCED = -1e-6
"""Logprobs above this are of tokens that nothing could have been sampled in place of."""


def unforced(logprobs: Sequence[float]) -> tuple[bool, ...]:
    """Of each sampled token, whether another one could have been sampled in its place."""
    return tuple(logprob < _FORCED for logprob in logprobs)


def samples_of(rollout: Rollout, advantage: float, *, skip_forced: bool = False) -> Iterator[Sample]:
    """The trainable sequences of a rollout: one, unless a turn's prompt does not continue the turn before it.

    ``advantage`` is that of every sampled token, unless the environment gave each its own. Turns that are not trained,
    and with ``skip_forced`` tokens that were sampled with probability 1, are not; nor is a sequence of none else.
    """
    of_tokens = repeat(advantage) if rollout.advantages is None else iter(rollout.advantages)
    sample = Sample(rollout=rollout.id)
    for turn in rollout.turns:
        sampled, logprobs, begin = turn.completion.tokens, turn.completion.logprobs, len(sample.tokens)
        if not sampled:
            continue
        if turn.temperature != sample.temperature or turn.prompt[:begin] != sample.tokens:
            if any(sample.mask):
                yield sample
            sample, begin = Sample(rollout=rollout.id, temperature=turn.temperature), 0
        mask = unforced(logprobs) if turn.trained and skip_forced else (turn.trained,) * len(sampled)
        advantages = tuple(islice(of_tokens, len(sampled)))
        if not all(mask):
            logprobs = tuple(p if it else 0.0 for p, it in zip(logprobs, mask, strict=True))
            advantages = tuple(a if it else 0.0 for a, it in zip(advantages, mask, strict=True))
        new = turn.prompt[begin:]
        none = (0.0,) * len(new)
        sample = replace(
            sample,
            tokens=sample.tokens + new + sampled,
            mask=sample.mask + (False,) * len(new) + mask,
            logprobs=sample.logprobs + none + logprobs,
            advantages=sample.advantages + none + advantages,
            begins=(*sample.begins, len(turn.prompt)),
            ends=(*sample.ends, len(turn.prompt) + len(sampled)),
            experts=sample.experts + turn.completion.experts[len(sample.experts) :],
        )
    if any(sample.mask):
        yield sample


class SampleArrays(NamedTuple):
    """A sample with its tokens as an array, and the places of its trained ones."""

    sample: Sample
    tokens: Ints
    at: Ints

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The arrays of a sample."""
        # array.array takes a tuple in about half the time that numpy does.
        tokens = np.frombuffer(array("q", sample.tokens), dtype=np.int64)
        return cls(sample, tokens, np.flatnonzero(np.frombuffer(bytes(sample.mask), dtype=np.bool_)))

    def trained(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Of one value for each token those of the trained ones."""
        return np.frombuffer(array("d", values))[self.at]


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One micro-batch: the tensors of one forward and backward pass."""

    tokens_T: Tensor
    """int64; what sequences share once, before what follows it."""
    positions_T: Tensor
    """int64; within each sequence."""
    plan: Packed
    """Which segment continues which."""
    predict_N: Tensor
    """int64; the place in T whose hidden state predicts each trained token."""
    targets_N: Tensor
    """int64; the trained token ids."""
    temperature_N: Tensor
    """float32; each token's sampling temperature."""
    history: TokenHistory | None
    """Penalties that the tokens were sampled with, and what was before each; None: there are none."""
    weights_N: Tensor
    """float32; what each token's loss counts, so that the step's loss is one sum over all micro-batches."""
    batch: MicroBatch
    """What the loss reads."""
    places: tuple[tuple[str, int], ...]
    """Rollout id and number of trained tokens of each sample, in order."""
    supervised: bool = False
    """Its tokens are to become likely: cross entropy of the model's own distribution, not the objective."""
    share: float = 1.0
    """Of the step's computed tokens, those that are computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The micro-batches of one optimizer step, and the groups they were made from."""

    micro: tuple[Micro, ...]
    """In no particular order: the step's result does not depend on it."""
    groups: tuple[Group, ...]
    """What it was made from."""
    advantages: Mapping[str, float]
    """By rollout id; the mean over its tokens where the environment gave one for each."""
    num_loss_tokens: int
    """Trained tokens, including those of samples that are skipped since they have no advantage."""
    metrics: Mapping[str, Value] = field(default_factory=dict)
    """Lag, advantages and number of the batch's groups."""
    supervised: bool = False
    """Its groups are demonstrations."""
    rounds: tuple[tuple[int | None, ...], ...] = ()
    """What ranks compute side by side, where there are several: the index of each rank's micro-batch, None for a rank
    that has none in that round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Packs the groups of a step into micro-batches."""

    advantage: Advantage
    reduction: str
    """The loss's: token, sequence or constant."""
    max_tokens: int
    """Of one completion; the constant reduction divides by it."""
    budget: int
    """Most tokens computed in one micro-batch, what is shared once; a longer sequence gets a micro-batch of its own."""
    mask_truncated: bool
    """Leave answers cut by a length limit out of the loss; they still count in their group's baseline."""
    device: torch.device
    """Where the tensors go."""
    width: int = 2048
    """The model's hidden size: how long a context must be for attention to count."""
    penalties: Penalties | None = None
    """What the tokens were sampled with."""
    skip_forced: bool = False
    """Train no token that the sampler had no choice about: its probability was 1."""
    ranks: int = 1
    """Processes that compute micro-batches side by side."""
    shares: bool = True
    """What sequences of a group begin with in common is computed once."""
    supervised: bool = False
    """Groups are demonstrations."""
    routing: Routing | None = None
    """Of the model, where its experts are those that the sampler chose."""
    skip_zero: bool = False
    """Compute no sample whose every advantage is 0: there the objective has no gradient. What the step divides by and
    its other samples stay as they are."""

    @classmethod
    def of(cls, config: RunConfig, policy: Policy, *, ranks: int = 1) -> Self:
        """The packer of a recipe's micro-batches."""
        shared, ways = config.distributed.context_parallel, ("tree",) if is_cut(config) else ("tree", "prefix")
        return cls(
            advantage=_advantage(config),
            reduction=config.loss.reduction,
            max_tokens=config.sampling.max_tokens,
            budget=config.micro_batch_tokens * shared,
            mask_truncated=config.truncated == "mask",
            device=policy.device if ranks == 1 else torch.device("cpu"),  # from which they are sent to their ranks
            width=policy.config.hidden_size,
            ranks=ranks // shared,  # those that share a micro-batch are as one
            # Weights that are cut are computed with by one pass, in which only a tree shares.
            shares=packing.chosen(policy.causal.config, config.packing).packing in ways,
            skip_zero=only_by_advantage(config),
            routing=routing.of(policy.causal) if config.router_replay else None,
            penalties=Penalties.of(config.sampling, sorted(policy.end_tokens)),
            skip_forced=bool(config.sampling.regex),
        )

    def supervising(self) -> Self:
        """The packer of demonstrations, which nobody sampled: each token counts the same, none is left out."""
        return replace(
            self, supervised=True, reduction="token", penalties=None, skip_forced=False, mask_truncated=False
        )

    def __call__(
        self, groups: Sequence[Group], *, version: int, penalties: Mapping[str, float] | None = None
    ) -> StepBatch:
        """Pack one step's groups.

        Args:
            groups: of the step.
            version: the policy step that will be trained; it only measures lag.
            penalties: what advantages take off the reward of each rollout, by its id.
        """
        groups = self.credited(groups)
        by_rollout: dict[str, float] = {}
        samples: list[list[Sample]] = []
        adjusted = [_penalised(group, penalties) for group in groups] if penalties else groups
        for group, values in zip(groups, advantages(self.advantage, adjusted), strict=True):
            siblings: list[Sample] = []
            for rollout, value in zip(group.scored, values, strict=True):
                of_tokens = rollout.advantages
                by_rollout[rollout.id] = value if of_tokens is None else math.fsum(of_tokens) / len(of_tokens)
                if rollout.trained and not (self.mask_truncated and rollout.truncated):
                    siblings.extend(samples_of(rollout, value, skip_forced=self.skip_forced))
            samples.append(siblings)
        counts = [sample.mask.count(True) for siblings in samples for sample in siblings]
        weigh = self._weights(sum(counts), len(counts))
        computed = _with_gradient(samples) if self.skip_zero else samples
        micro, costs = self._micros(computed, weigh)
        rounds = rounds_of(costs, self.ranks) if self.ranks > 1 else []
        of_groups: dict[str, Value] = {"demonstrations": Sum(float(len(groups)))}
        if not self.supervised:
            of_groups = {
                "lag": Histogram(tuple(float(version - group.version_min) for group in groups)),
                "advantage/abs": Mean.of(map(abs, by_rollout.values())),
                "groups/trained": Sum(float(len(groups))),
            }
        return StepBatch(
            micro=micro,
            groups=tuple(groups),
            advantages=by_rollout,
            num_loss_tokens=sum(counts),
            metrics={
                **of_groups,
                **_skip_counts(samples, computed),
                "tokens/trained": Sum(float(sum(len(m.targets_N) for m in micro))),
                "tokens/computed": Sum(float(sum(len(m.tokens_T) for m in micro))),
                "micro_batches": Sum(float(len(micro))),
                **_imbalance(rounds, costs),
            },
            rounds=tuple(rounds),
            supervised=self.supervised,
        )

    def credited(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups, with advantages of tokens where turns have their own."""
        return [spread(self.advantage, group) for group in groups] if isinstance(self.advantage, ByTurn) else groups

    def _weights(self, num_tokens: int, num_samples: int) -> Callable[[int], float]:
        """Weight of each token of a sample, given how many trained tokens the sample has."""
        if self.reduction == "token":
            return lambda length: 1.0 / num_tokens
        if self.reduction == "sequence":
            return lambda length: 1.0 / (num_samples * length)
        return lambda length: 1.0 / (num_samples * self.max_tokens)

    def _micros(
        self, samples: Sequence[Sequence[Sample]], weigh: Callable[[int], float]
    ) -> tuple[tuple[Micro, ...], list[float]]:
        """Deal the groups' samples out, and lay out what is computed together; micro-batches and their costs."""
        groups = [[SampleArrays.of(sample) for sample in siblings] for siblings in samples if siblings]
        if not self.shares:
            groups = [[each] for siblings in groups for each in siblings]
        families = [
            GroupSamples(
                tree=PrefixTree([each.tokens[:-1] for each in siblings]),
                rollouts=[each.sample.rollout for each in siblings],
            )
            for siblings in groups
        ]
        reach = WIDTHS_TO_EQUAL * self.width
        loads = Balance(families, budget=self.budget, reach=reach, ranks=self.ranks).loads()
        micros: list[Micro] = []
        for load in loads:
            row = PackedRow()
            taken: list[SampleArrays] = []
            predict: list[Ints] = []
            computed: list[Ints] = []
            for g, members in sorted(load.members.items()):
                places = row.add(families[g].tree, members)
                taken += (groups[g][i] for i in members)
                computed += (places[i] for i in members)
                # The token at place ``at`` is predicted by the one before it.
                predict += (places[i][groups[g][i].at - 1] for i in members)
            micros.append(self._tensors(row, taken, predict, computed, weigh))
        num_tokens = sum(len(micro.tokens_T) for micro in micros)
        micros = [replace(micro, share=len(micro.tokens_T) / num_tokens) for micro in micros]
        return tuple(micros), [load.cost for load in loads]

    def _tensors(
        self,
        row: PackedRow,
        samples: Sequence[SampleArrays],
        predict: Sequence[Ints],
        computed: Sequence[Ints],
        weigh: Callable[[int], float],
    ) -> Micro:
        """One micro-batch on the device, in two transfers, and one more for experts."""
        experts_TLK = None if self.routing is None else self._experts(self.routing, sum(row.lengths), samples, computed)
        plan = Packed(lengths=tuple(row.lengths), parents=tuple(row.parents), experts_TLK=experts_TLK)
        counts = [len(each.at) for each in samples]
        ints = (
            np.concatenate(row.tokens),
            np.asarray(sequential_positions(plan)),
            np.concatenate(predict),
            np.concatenate([each.tokens[each.at] for each in samples]),
            np.repeat(np.arange(len(samples)), counts),
        )
        past: Sequence[NDArray[Any]] = ()
        if self.penalties is not None:
            past = joined([Past.of(tokens, at, of.begins, of.ends) for of, tokens, at in samples])
        floats = (
            np.repeat([each.sample.temperature for each in samples], counts),
            np.repeat([weigh(count) if count else 0.0 for count in counts], counts),
            np.concatenate([each.trained(each.sample.logprobs) for each in samples]),
            np.concatenate([each.trained(each.sample.advantages) for each in samples]),
        )
        tokens_T, positions_T, predict_N, targets_N, sample_N, *before = self._moved((*ints, *past), np.int64)
        temperature_N, weights_N, logprobs_N, advantages_N = self._moved(floats, np.float32)
        return Micro(
            tokens_T=tokens_T,
            positions_T=positions_T,
            plan=plan,
            predict_N=predict_N,
            targets_N=targets_N,
            temperature_N=temperature_N,
            history=None if self.penalties is None else TokenHistory.of(self.penalties, before),
            weights_N=weights_N,
            batch=MicroBatch(
                behavior_logprobs_N=logprobs_N, advantages_N=advantages_N, sample_N=sample_N, num_samples=len(samples)
            ),
            places=tuple((each.sample.rollout, count) for each, count in zip(samples, counts, strict=True)),
            supervised=self.supervised,
        )

    def _experts(
        self, routing: Routing, num_tokens: int, samples: Sequence[SampleArrays], computed: Sequence[Ints]
    ) -> Tensor:
        """Experts that each token was routed to; what samples share as in the first of them."""
        experts_TLK = np.full((num_tokens, routing.layers, routing.top_k), OWN, dtype=np.int16)
        for each, places in reversed(list(zip(samples, computed, strict=True))):
            rows = routing.rows(each.sample.experts)[: len(places)]
            experts_TLK[places[: len(rows)]] = rows
        return moved(experts_TLK, self.device)

    def _moved(self, arrays: Sequence[NDArray[Any]], kind: type[np.int64 | np.float32]) -> tuple[Tensor, ...]:
        """Tensors on the device, of one transfer."""
        whole = moved(np.concatenate(arrays, dtype=kind, casting="same_kind"), self.device)
        parts: tuple[Tensor, ...] = whole.split([len(array) for array in arrays])
        return parts


def _penalised(group: Group, penalties: Mapping[str, float]) -> Group:
    """The group with penalties taken off its rewards."""
    rollouts = (
        r if r.reward is None else replace(r, reward=r.reward - penalties.get(r.id, 0.0)) for r in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))


def _advantage(config: RunConfig) -> Advantage:
    if not isinstance(config.advantage, Weighs):
        return config.advantage
    return config.advantage.weighed(
        {env: {name: spec.weight for name, spec in source.rewards.items()} for env, source in config.sources.items()}
    )


def _with_gradient(samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Samples of each group that have a gradient.

    If none has, the shortest: the optimizer's step by a gradient of zeros is not the same as no step.
    """
    kept = [[sample for sample in siblings if any(sample.advantages)] for siblings in samples]
    if not any(kept) and any(samples):
        kept = [[min((sample for siblings in samples for sample in siblings), key=lambda sample: len(sample.tokens))]]
    return kept


def _skip_counts(samples: Sequence[Sequence[Sample]], computed: Sequence[Sequence[Sample]]) -> dict[str, Value]:
    """Counts samples skipped: zero advantage, or identical to a sibling."""
    each = [len(siblings) for siblings in computed]
    twice = sum(each) - sum(len({sample.tokens for sample in siblings}) for siblings in computed)
    skipped = sum(map(len, samples)) - sum(each)
    return {"samples/without_advantage": Sum(float(skipped)), "samples/duplicate": Sum(float(twice))}


def _imbalance(rounds: Sequence[Sequence[int | None]], costs: Sequence[float]) -> dict[str, Value]:
    """How much longer rounds take than if their ranks had computed the same: cost of the highest over the mean."""
    shares = [[0.0 if i is None else costs[i] for i in row] for row in rounds]
    return {"ranks/imbalance": Mean.of(max(row) * len(row) / math.fsum(row) for row in shares)} if shares else {}
