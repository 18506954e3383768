"""Variations that must not change a step: how its samples are cut, ordered, shared, padded, dealt out and computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from tandem.model import layers
from tandem.model.attention import Packed, sequential_positions
from tandem.model.layers import Checkpointing
from tandem.tools.certify.policy import CertifiedPolicy, Gradient
from tandem.trainer.pack import Micro, Packer
from tandem.types import Group

SMALL = 40
"""Tokens of a micro-batch, where a step is to have several."""
PADDED_TO = 64
"""Tokens of a padded row are a multiple of this."""
CUTS = (3, 7)
"""Chunks that the vocabulary is cut into."""
RANKS = 3
"""Ranks that a step is dealt to."""

Variation = Callable[[CertifiedPolicy, Packer, Sequence[Group]], list[list[Gradient]]]
"""The gradients of some ways to compute the same step."""


def budgets(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Every answer in a micro-batch of its own, a few, and all in one."""
    whole = sum(len(micro.tokens_T) for micro in pack(groups, version=0).micro)
    each = [dataclasses.replace(pack, budget=budget) for budget in (1, max(2, whole // 3), whole + 1)]
    return [live.gradients(other(groups, version=0)) for other in each]


def order(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Groups and siblings the other way round, whole and cut."""
    turned = [dataclasses.replace(group, rollouts=group.rollouts[::-1]) for group in groups[::-1]]
    return [live.gradients(dataclasses.replace(pack, budget=b)(turned, version=0)) for b in (pack.budget, SMALL)]


def unshared(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Every answer with a prompt of its own, packed beside the others."""
    values = pack(groups, version=0).advantages
    alone = []
    for group in pack.credited(groups):
        for rollout in group.scored:
            advantages = rollout.advantages or (values[rollout.id],) * rollout.num_tokens
            one = dataclasses.replace(rollout, advantages=advantages)
            alone.append(dataclasses.replace(group, id=rollout.id, rollouts=(one,)))
    return [live.gradients(pack(alone, version=0))]


def ranks(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """The sum of what several ranks compute of the micro-batches that each is dealt, one rank after the other."""
    batch = dataclasses.replace(pack, budget=SMALL, ranks=RANKS)(groups, version=0)
    by_rank = []
    for dealt in zip(*batch.rounds, strict=True):
        dealt_micro = tuple(batch.micro[i] for i in dealt if i is not None)
        by_rank.append(live.gradients(dataclasses.replace(batch, micro=dealt_micro, rounds=())))
    return [[{name: sum(one[name] for one in each) for name in each[0]} for each in zip(*by_rank, strict=True)]]


def padding(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Untrained tokens after the others, as many as make the row long enough."""
    batch = pack(groups, version=0)
    return [live.gradients(dataclasses.replace(batch, micro=tuple(map(_padded, batch.micro))))]


def _padded(micro: Micro) -> Micro:
    missing = -len(micro.tokens_T) % PADDED_TO or PADDED_TO
    plan = Packed(lengths=(*micro.plan.lengths, missing), parents=(*micro.plan.parents, None))
    tokens_T = torch.cat([micro.tokens_T, micro.tokens_T.new_zeros(missing)])
    positions_T = torch.tensor(sequential_positions(plan), device=micro.positions_T.device)
    return dataclasses.replace(micro, tokens_T=tokens_T, positions_T=positions_T, plan=plan)


def tiles(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """The vocabulary walked in a few chunks, and in more."""
    batch = pack(groups, version=0)
    logits = max(len(micro.targets_N) for micro in batch.micro) * live.policy.head.weight.shape[0]
    gradients = []
    try:
        for cut in CUTS:
            live.work.tile = logits // cut
            gradients.append(live.gradients(batch))
    finally:
        live.work.tile = None
    return gradients


def recomputed(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Layers computed again in the backward pass: all but their products, and all of them."""
    batch, gradients = pack(groups, version=0), []
    ways: tuple[Checkpointing, ...] = ("selective", "full")
    try:
        for way in ways:
            layers.tune(live.policy.model, compile=False, checkpointing=way)
            gradients.append(live.gradients(batch))
    finally:
        layers.tune(live.policy.model, compile=False)
    return gradients


VARIATIONS: Mapping[str, Variation] = {
    "micro-batch sizes": budgets,
    "order of groups and answers": order,
    "prompts shared or not": unshared,
    f"{RANKS} ranks": ranks,
    "padding": padding,
    "logprob chunk sizes": tiles,
    "layers computed again": recomputed,
}
"""By what a person calls them."""
