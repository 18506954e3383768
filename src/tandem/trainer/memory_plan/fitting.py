"""``memory: fit``: the first of a few settings whose memory plan fits, from the fastest to the smallest.

None of them changes what a step computes but by rounding, and by adamw8bit's coarser moments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig
from tandem.optimizers.base import Optimizer
from tandem.trainer.memory_plan.plan import MARGIN, MemoryPlan, Planner
from tandem.trainer.memory_plan.ranks import RankCounts

Checkpointing = Literal["none", "selective", "full"]
SMALLEST = 1024
"""Tokens of a micro-batch below which memory is rather saved elsewhere, unless the recipe bounds it so."""
ROOM = 1 / (1 + MARGIN)
"""Share of what is free that is filled, if that can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A recipe with the settings that were chosen."""

    config: RunConfig
    """To be run and saved: its memory is ``check``, for there is nothing left to choose."""
    plan: MemoryPlan
    """Of it."""
    message: str
    """What was chosen."""


def fit(run: Planner, config: RunConfig, set_options: Collection[str]) -> Fitted:
    """Choose the first settings of the ladder that fit.

    Args:
        run: plans it.
        config: the recipe.
        set_options: options that its file sets, by dotted path. ``micro_batch_tokens`` is then the most that is taken;
            ``checkpointing`` and ``optimizer.precision`` are kept, and so is every optimizer but adamw.

    Raises:
        DoesNotFit: not even the smallest settings do.
    """
    plans = [(each, run.plan(each)) for each in _ladder(run, config, set_options)]
    for share in (ROOM, 1.0):
        for chosen, plan in plans:
            if plan.within(share):
                return Fitted(config=chosen, plan=plan, message=f"memory: fit chose {_settings(chosen)}")
    smallest, plan = min(plans, key=lambda one: one[1].total)
    plan.require(f"this run with {_settings(smallest)}, the smallest settings that memory: fit may choose,")
    raise AssertionError("what fits was not found")


def settled(
    run: Planner, config: RunConfig, set_options: Collection[str] = (), *, tell: Callable[[str], None] = print
) -> RunConfig:
    """The recipe as it is run: as it is, or fitted and told so. Arguments as of ``fit``.

    Raises:
        DoesNotFit: with the largest lines and what changes them.
    """
    if config.memory == "check":
        run.plan(config).require()
        return config
    fitted = fit(run, config, set_options)
    tell(fitted.message)
    return fitted.config


def chooses_gradients(config: RunConfig, ranks: RankCounts) -> bool:
    """Whether ``distributed.gradients`` is chosen by what is free."""
    return ranks.world > 1 and config.distributed.gradients == "auto"


def with_gradients(run: Planner, config: RunConfig) -> RunConfig:
    """The recipe with ``distributed.gradients`` chosen, as this run has it: another number of ranks may choose anew.

    Gradients are local where a step has several micro-batches for each rank and the plan has room for their sums.
    """
    if not chooses_gradients(config, run.ranks):
        return config
    divided = config.distributed
    local, scattered = (replace(config, distributed=replace(divided, gradients=way)) for way in ("local", "scattered"))
    at_once = run.ranks.world // divided.context_parallel * config.micro_batch_tokens
    has_rounds = run.step_tokens(config) > at_once
    return local if has_rounds and run.plan(local).within(ROOM) else scattered


def _ladder(run: Planner, config: RunConfig, set_options: Collection[str]) -> Iterator[RunConfig]:
    """Recipes from the fastest to the smallest: optimizers, for each checkpointing, for each smaller micro-batches."""
    whole = run.step_tokens(config)
    most = min(whole, config.micro_batch_tokens) if "micro_batch_tokens" in set_options else whole
    longest = -(-sum(run.longest(config)) // config.distributed.context_parallel)
    least = min(most, max(SMALLEST, longest))
    sizes = sorted({least, *(max(least, -(-most >> power)) for power in range(most.bit_length()))}, reverse=True)
    every: tuple[Checkpointing, ...] = ("none", "selective", "full")
    kept = (config.checkpointing,) if "checkpointing" in set_options else every
    for optimizer, how, size in product(_optimizers(config, set_options, run.machine.is_host), kept, sizes):
        yield replace(config, memory="check", optimizer=optimizer, checkpointing=how, micro_batch_tokens=size)


def _optimizers(config: RunConfig, set_options: Collection[str], on_host: bool) -> Iterator[Optimizer]:
    """adamw with ever smaller states; any other alone, and that of ranks whose weights are cut, which have no other."""
    own = config.optimizer
    yield own
    if resolve.kind_of("optimizers", own) != "adamw" or config.distributed.shard == "weights":
        return
    free = "optimizer.precision" not in set_options
    kahan = {"precision": "kahan"} if free and config.dtype == "bfloat16" else {}  # to the bit what masters give
    ways: list[tuple[str, dict[str, str]]] = [("adamw", kahan), ("adamw8bit", kahan)]
    if free and not on_host:
        ways.append(("adamw_cpu", {}))
    for kind, changes in ways:
        cls = resolve.find("optimizers", kind)
        yield cls(**{option.name: getattr(own, option.name) for option in resolve.options(cls)} | changes)


def _settings(config: RunConfig) -> str:
    """What the ladder chose, in the recipe's words."""
    precision = getattr(config.optimizer, "precision", "") if config.dtype == "bfloat16" else ""
    optimizer = resolve.kind_of("optimizers", config.optimizer) + (f" (precision: {precision})" if precision else "")
    size, how = config.micro_batch_tokens, config.checkpointing
    return f"micro_batch_tokens: {size}, checkpointing: {how}, optimizer: {optimizer}"
