"""``memory: fit``: the fastest settings whose memory plan fits.

What is tried, first what costs no time: the optimizer as it is, with smaller states, with narrower gradients, and on
the host; for each of them all activations kept, then some, then those between layers alone; and for each of these the
largest micro-batch that fits. None of it changes what a step computes but by rounding, and by adamw8bit's coarser
moments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig
from tandem.machine import readable
from tandem.optimizers.base import Optimizer
from tandem.trainer.memory_plan.plan import MemoryPlan, Planner
from tandem.trainer.memory_plan.ranks import RankCounts

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""From the fastest to the smallest."""
SMALLEST = 1024
"""Tokens of a micro-batch below which memory is rather saved elsewhere, unless the recipe bounds it so."""
NARROW = 32
"""Most micro-batches of a step whose gradients are added up in bfloat16, where the recipe does not ask for it."""
ROOM = 0.9
"""Share of what is free that is filled, if that can be: the plan may be wrong by a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A recipe with the settings that were chosen, its plan, and why."""

    config: RunConfig
    """To be run and saved: its memory is ``check``, for there is nothing left to choose."""
    plan: MemoryPlan
    """Of it."""
    messages: tuple[str, ...]
    """What was chosen and why, a line each."""


def fit(run: Planner, config: RunConfig, set_options: Collection[str]) -> Fitted:
    """Choose what a run that fits does.

    Args:
        run: plans it.
        config: the recipe.
        set_options: options that its file sets, by dotted path. ``micro_batch_tokens`` is then the most that is taken;
            ``checkpointing``, ``optimizer.precision`` and ``optimizer.gradients`` are kept, and so is every optimizer
            but adamw.

    Raises:
        DoesNotFit: nothing does; with the table of the smallest.
    """
    every = budgets(run, config, set_options)
    smallest: MemoryPlan | None = None
    for share in (ROOM, 1.0):
        for ways in _ways(config, set_options, run):
            sizes = _precise(run, ways, every)
            fitting = _largest(run, ways, sizes, share)
            if fitting is not None:
                return _fitted(run, config, fitting, set_options)
            plan = run.plan(_with(ways, sizes[0]))
            smallest = plan if smallest is None else min(smallest, plan, key=lambda one: one.lack)
    assert smallest is not None
    dataclasses.replace(smallest, fitted=True).require()
    raise AssertionError("what fits was not found")


def settled(
    run: Planner, config: RunConfig, set_options: Collection[str] = (), *, tell: Callable[[str], None] = print
) -> RunConfig:
    """The recipe as it is run: as it is, or fitted and told so. Arguments as of ``fit``.

    Raises:
        DoesNotFit: with the table and what to change.
    """
    if config.memory == "check":
        run.plan(config).require()
        return config
    fitted = fit(run, config, set_options)
    for line in fitted.messages:
        tell(line)
    return fitted.config


def chooses_gradients(config: RunConfig, ranks: RankCounts) -> bool:
    """Whether ``distributed.gradients`` is chosen by what is free."""
    return ranks.world > 1 and config.distributed.gradients == "auto"


def with_gradients(run: Planner, config: RunConfig) -> RunConfig:
    """The recipe with ``distributed.gradients`` chosen, as this run has it: another number of ranks may choose anew.

    Gradients are local where a step has several micro-batches for each rank and the plan has room for their sums.

    Args:
        run: plans it.
        config: the recipe, settled.
    """
    if not chooses_gradients(config, run.ranks):
        return config
    divided = config.distributed
    local, scattered = (
        dataclasses.replace(config, distributed=dataclasses.replace(divided, gradients=way))
        for way in ("local", "scattered")
    )
    at_once = run.ranks.world // divided.context_parallel * config.micro_batch_tokens
    has_rounds = run.step_tokens(config) > at_once
    return local if has_rounds and run.plan(local).within(ROOM) else scattered


def budgets(run: Planner, config: RunConfig, set_options: Collection[str]) -> list[int]:
    """Micro-batches that are tried, in tokens, ascending: a step in one, two, three, four, six, eight and so on."""
    whole = run.step_tokens(config)
    most = min(whole, config.micro_batch_tokens) if "micro_batch_tokens" in set_options else whole
    least = min(most, max(SMALLEST, sum(run.longest_part(config))))
    sizes = [most]
    for parts in (n << power for power in range(whole.bit_length()) for n in (2, 3)):
        size = -(-most // parts)
        if size <= least:
            break
        sizes.append(size)
    return sorted({least, *sizes})


def _precise(run: Planner, config: RunConfig, sizes: list[int]) -> list[int]:
    """Those that leave gradients precise enough: each micro-batch rounds a narrow sum once more."""
    if getattr(config.optimizer, "gradients", "") != "bfloat16":
        return sizes
    return [size for size in sizes if run.step_tokens(config) <= NARROW * size] or sizes[-1:]


def _largest(run: Planner, config: RunConfig, sizes: list[int], share: float) -> RunConfig | None:
    """The recipe with the largest micro-batch that fits; more tokens never take less."""

    def fits(size: int) -> bool:
        return run.plan(_with(config, size)).within(share)

    if not fits(sizes[0]):
        return None
    low, high = 0, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return _with(config, sizes[low])


def _with(config: RunConfig, size: int) -> RunConfig:
    return dataclasses.replace(config, micro_batch_tokens=size)


def _ways(config: RunConfig, set_options: Collection[str], run: Planner) -> Iterator[RunConfig]:
    """Recipes from the fastest to the smallest, but for their micro-batches."""
    kept = "checkpointing" in set_options
    for optimizer in _optimizers(config, set_options, run.machine.is_host):
        for how in (config.checkpointing,) if kept else CHECKPOINTING:
            yield dataclasses.replace(config, memory="check", optimizer=optimizer, checkpointing=how)


def _optimizers(config: RunConfig, set_options: Collection[str], on_host: bool) -> Iterator[Optimizer]:
    """adamw with ever smaller states; alone any other, and one of ranks whose weights are cut, which have no other."""
    own = config.optimizer
    yield own
    if resolve.kind_of("optimizers", own) != "adamw" or config.distributed.shard == "weights":
        return
    yield _as("adamw8bit", own, {})
    whole = (
        resolve.kind_of("trainable", config.trainable) == "full"
    )  # an adapter's weights are float32, and so are its gradients
    if whole and config.dtype == "bfloat16" and "optimizer.gradients" not in set_options:
        yield _as("adamw8bit", own, {"gradients": "bfloat16"})
    if not on_host and "optimizer.precision" not in set_options:
        yield _as("adamw_cpu", own, {})


def _as(kind: str, optimizer: Optimizer, changes: dict[str, str]) -> Optimizer:
    """Another kind with the same options."""
    cls = resolve.find("optimizers", kind)
    same = {option.name: getattr(optimizer, option.name) for option in resolve.options(cls)}
    made: Optimizer = cls(**same | changes)
    return made


def _fitted(run: Planner, before: RunConfig, config: RunConfig, set_options: Collection[str]) -> Fitted:
    plan = run.plan(config)
    return Fitted(config=config, plan=plan, messages=tuple(_messages(run, before, config, set_options)))


def _messages(run: Planner, before: RunConfig, config: RunConfig, set_options: Collection[str]) -> Iterator[str]:
    """What was chosen and why."""
    size, whole = config.micro_batch_tokens, run.step_tokens(config)
    parts = -(-whole // size)
    if "micro_batch_tokens" in set_options and size == before.micro_batch_tokens:
        why = "the recipe's own bound"
    elif parts == 1:
        why = "a whole step of the longest answers"
    else:
        why = f"the largest that fits, about {parts} to a step of the longest answers"
        why += f"; the recipe allows {before.micro_batch_tokens}" if "micro_batch_tokens" in set_options else ""
    yield f"micro_batch_tokens: {size}, {why}"
    if "checkpointing" in set_options:
        yield f"checkpointing: {config.checkpointing}, as the recipe says"
    elif config.checkpointing == "none":
        yield "checkpointing: none, there is room for all activations"
    else:
        faster = CHECKPOINTING[CHECKPOINTING.index(config.checkpointing) - 1]
        yield f"checkpointing: {config.checkpointing}, {_lack(run, config, checkpointing=faster)}"
    name = f"optimizer: {resolve.kind_of('optimizers', config.optimizer)}"
    precision = getattr(config.optimizer, "precision", "")
    if precision and config.dtype == "bfloat16":
        narrow = ", gradients: bfloat16" if getattr(config.optimizer, "gradients", "") == "bfloat16" else ""
        name += f" (precision: {precision}{narrow})"
    if config.optimizer == before.optimizer:
        yield f"{name}, as the recipe has it"
    else:
        yield f"{name}, {_lack(run, config, optimizer=before.optimizer)}"


def _lack(run: Planner, config: RunConfig, **faster: object) -> str:
    """Why something faster was not chosen: what it would need with micro-batches as they are now."""
    plan = run.plan(dataclasses.replace(config, **faster))  # type: ignore[arg-type]
    (value,) = faster.values()
    name = value if isinstance(value, str) else "the recipe's"
    return f"since {name} needs {readable(plan.total)} of {readable(plan.machine.free)} with micro-batches of this size"
