"""Variations that must not change a step: how its samples are cut, ordered, shared, padded and computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from tandem.model.attention import Packed, sequential_positions
from tandem.model.layers import Checkpointing
from tandem.tools.certify.gradients import CertifiedPolicy, Gradient
from tandem.trainer.pack import Micro, Packer, StepBatch
from tandem.types import Group

PADDED_TO = 64
"""Tokens of a padded row are a multiple of this."""
CUTS = (3, 7)
"""Chunks that the vocabulary is cut into."""

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
    return [live.gradients(dataclasses.replace(pack, budget=b)(turned, version=0)) for b in (pack.budget, 40)]


def unshared(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Every answer with a prompt of its own, packed beside the others."""
    values = pack(groups, version=0).advantages
    alone = []
    for group in groups:
        for rollout in group.scored:
            advantages = rollout.advantages or (values[rollout.id],) * rollout.num_tokens
            one = dataclasses.replace(rollout, advantages=advantages)
            alone.append(dataclasses.replace(group, id=rollout.id, rollouts=(one,)))
    return [live.gradients(pack(alone, version=0))]


def padding(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Untrained tokens after the others, as many as make the row long enough."""
    batch = pack(groups, version=0)
    return [live.gradients(dataclasses.replace(batch, micro=tuple(map(_padded, batch.micro))))]


def tiles(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """The vocabulary walked in a few chunks, and in more."""
    batch = pack(groups, version=0)
    logits = max(len(micro.targets_N) for micro in batch.micro) * live.policy.head.weight.shape[0]
    try:
        ways = []
        for cut in CUTS:
            live.setup.tile = logits // cut
            ways.append(live.gradients(batch))
        return ways
    finally:
        live.setup.tile = None


def recomputed(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Layers computed again in the backward pass: all but their products, and all of them.

    Raises:
        ConfigError: it is not known which of the model's modules are its layers.
    """
    batch = pack(groups, version=0)
    return [_tuned(live, batch, compile=False, checkpointing=how) for how in ("selective", "full")]


def compiled(live: CertifiedPolicy, pack: Packer, groups: Sequence[Group]) -> list[list[Gradient]]:
    """Layers compiled for the CPU, all kept and some computed again.

    Raises:
        ConfigError: the machine cannot, or it is not known which of the model's modules are its layers.
    """
    batch = pack(groups, version=0)
    return [_tuned(live, batch, compile=True, checkpointing=how) for how in ("none", "selective")]


VARIATIONS: Mapping[str, Variation] = {
    "micro-batch sizes": budgets,
    "order of groups and answers": order,
    "prompts shared or not": unshared,
    "padding": padding,
    "logprob chunk sizes": tiles,
    "layers computed again": recomputed,
    "layers compiled": compiled,
}
"""By what a person calls them."""


def _tuned(live: CertifiedPolicy, batch: StepBatch, *, compile: bool, checkpointing: Checkpointing) -> list[Gradient]:
    try:
        live.tune(compile=compile, checkpointing=checkpointing)
        return live.gradients(batch)
    finally:
        live.tune(compile=False)


def _padded(micro: Micro) -> Micro:
    missing = -len(micro.tokens_T) % PADDED_TO or PADDED_TO
    plan = Packed(lengths=(*micro.plan.lengths, missing), parents=(*micro.plan.parents, None))
    tokens_T = torch.cat([micro.tokens_T, micro.tokens_T.new_zeros(missing)])
    positions_T = torch.tensor(sequential_positions(plan), device=micro.positions_T.device)
    return dataclasses.replace(micro, tokens_T=tokens_T, positions_T=positions_T, plan=plan)
