"""The world of a run: the ranks that train its policy, here one; how each loads it, and what they want of an engine.

A run chooses its world once, at its start (``assemble.py``), and what concerns all ranks is asked of it: loading and
binding the policy, starting engines, weights for their sync, checkpoints. ``ranks/lead.py`` has the world of several
ranks. Nobody else knows how many there are, or that one of them has all weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem import machine
from tandem.algorithms.references.base import ReferenceWeights
from tandem.config.loading import RunConfig
from tandem.engines.base import Engine, EngineRequirements, EngineSpec, ReportsChecksums
from tandem.model import float8, layers, packing
from tandem.model.policy import Compute, Policy, load_config, load_model, load_tokenizer
from tandem.observability import progress, waits
from tandem.trainer import memory_plan
from tandem.trainer.pairs import has_engines_beside, is_cut, ranks_of_engine
from tandem.trainer.step import LocalWork
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.transaction.trained import Trained

T = TypeVar("T")

Hold = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Tensors as they are now, as ``Staging.hold`` keeps them."""
Write = Callable[[Path], object]
"""Writes what was staged into a folder."""


@asynccontextmanager
async def live_policy(
    config: RunConfig, *, local_rank: int = 0, local_ranks: int = 1, bare: bool = False
) -> AsyncIterator[Policy]:
    """Model, adapter and tokenizer on the compute thread, for one of several ranks of this host.

    A bare one has no weights: its model is on the meta device.
    """
    with waits.blocking("trainer", "its tokenizer", model_of(config), config.timeouts.wait_seconds):
        tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    compute = Compute(config.threads or max(1, machine.cores() // local_ranks))

    def load() -> Any:
        torch.manual_seed(config.seed)
        if rank_device(local_rank).index:  # until a thread is told another device, its kernels run on the first
            torch.cuda.set_device(rank_device(local_rank))
        dtype = getattr(torch, config.dtype)
        if bare:
            model = packing.bare(load_config(config.model), dtype=dtype, packing=config.packing)
        else:
            # On the host where weights are cut, or will be those in an engine's memory.
            on_host = is_cut(config) or has_engines_beside(config)
            device = torch.device("cpu") if on_host else rank_device(local_rank)
            model = load_model(config.model, dtype=dtype, device=device, packing=config.packing)
        model = prepared(config, model)
        if config.matmul == "fp8":
            float8.convert(model)
        layers.tune(model, compile=config.compile, checkpointing=config.checkpointing)
        return model

    try:
        with progress.under_way(f"loading the weights of {config.model}"):
            model = await waits.wait(compute(load), owner="trainer", reason="its weights", on=model_of(config))
        yield Policy(model, tokenizer, name=config.model, compute=compute, compile=config.compile)
    finally:
        compute.close()


def prepared(config: RunConfig, model: Any) -> torch.nn.Module:
    """A loaded model as a run trains it: with its adapter, and without dropout."""
    whole: torch.nn.Module = config.trainable.prepare(model).eval()
    return whole


def model_of(config: RunConfig) -> str:
    """As waits call it."""
    return f"model {config.model}"


def rank_device(local_rank: int) -> torch.device:
    """Accelerator of a rank, by its number on its host."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def changing(config: RunConfig, policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    """The weights that training changes and the model computes with, as they are loaded: before any checkpoint."""
    return [(name, policy.model.get_parameter(name)) for name, _ in config.trainable.source(policy.model)]


async def reference_of(config: RunConfig, policy: Policy) -> ReferenceWeights | None:
    """The weights of the objective's reference, if it has one; taken before any checkpoint is loaded."""
    if config.reference is None:
        return None
    return await policy.compute(config.reference.hold, changing(config, policy))


class World:
    """One rank, which does everything itself.

    Args:
        config: the recipe.
        policy: loaded.
    """

    size = 1

    def __init__(self, config: RunConfig, policy: Policy):
        self.config, self.policy = config, policy

    @classmethod
    @asynccontextmanager
    async def opened(cls, config: RunConfig) -> AsyncIterator[World]:
        """The world with the policy loaded."""
        async with live_policy(config) as policy:
            yield cls(config, policy)

    async def watch(self, training: Coroutine[Any, Any, T]) -> T:
        """Await training, unless a rank is lost meanwhile."""
        return await training

    # The engine and its weights

    async def start_engine(self, stack: AsyncExitStack, requirements: EngineRequirements) -> Engine:
        """Start the engine. What ``policy`` is may change here, since weights can be cut once an engine has its own."""
        context = memory_plan.context(self.config, self.policy.config)
        opening = self.engine.open(self.policy, context=context, requirements=requirements)
        return await stack.enter_async_context(opening)

    @property
    def engine(self) -> EngineSpec:
        """The recipe's engine."""
        return self.config.engine

    @property
    def sync(self) -> WeightSync:
        """The way in which weights reach the engine."""
        return self.config.sync

    def trained(self) -> Trained:
        """The weights or the adapter as weight sync reads them."""
        return Trained(self.config.trainable, self.policy)

    async def attach(self, exports: Sequence[Any], fresh: bool) -> None:
        """Have every other rank attach the weights of its engine."""

    async def adapt(self, slots: Sequence[Any]) -> None:
        """Have every other rank write its adapter into its engine's slot."""

    async def fold(self, here: Coroutine[Any, Any, None]) -> None:
        """Have every rank's model follow its parameters, that of this one by ``here``."""
        await here

    # The step

    async def bind(self, reference: ReferenceWeights | None) -> LocalWork:
        """Bind the optimizer to the trained parameters; the work of a step."""
        parameters = self.config.trainable.parameters(self.policy.model)
        stepper = await self.policy.compute(self.config.optimizer.bind, parameters)
        return LocalWork.of(self.config, self.policy, stepper, reference)

    # Checkpoints

    async def load_weights(self, path: Path) -> None:
        """Have every other rank load the weights of a checkpoint."""

    async def load_states(self, checkpoint: Path) -> None:
        """Have every other rank load its part of the optimizer's states."""

    def stage_weights(self, hold: Hold) -> Write:
        """What writes what this rank saves of the weights, as they are now; called on the compute thread."""
        trainable, policy = self.config.trainable, self.policy
        weights = hold(trainable.live_tensors(policy.model))
        return lambda folder: trainable.write(policy.model, weights, policy.tokenizer, folder / trainable.folder_name)

    async def save(self, folder: Path, here: Coroutine[Any, Any, T]) -> T:
        """Have every rank stage its share of a checkpoint, this one by ``here``; the others then write theirs."""
        return await here

    async def written(self) -> None:
        """Wait until other ranks have written what they staged.

        Raises:
            OSError: the disk of one refuses, which is said once none of them writes any more.
        """


def engine_requirements(config: RunConfig, folder: Path | None, *, restored: int = 0) -> EngineRequirements:
    """Requirements of the run for its engine, which after ``restored`` steps starts on the checkpoint's own weights."""
    saved = folder / "checkpoints" / f"{restored:06d}" / config.trainable.folder_name if folder and restored else None
    return EngineRequirements(
        model=config.model,
        dtype=config.dtype,
        folder=folder,
        weights=saved if config.trainable.folder_name == "model" else None,
        payload=config.trainable.payload,
        rank=getattr(config.trainable, "rank", 0),
        targets=_adapted(config),
        capability=config.sync.capability,
        versions=config.max_lag + 2,
        answers=-(-config.groups_per_step * config.group_size // _engines(config)),
        seed=config.seed,
        router_replay=config.router_replay,
    )


def _engines(config: RunConfig) -> int:
    """Engines that share a step's answers."""
    if has_engines_beside(config) and isinstance(config.ranks, int):
        return max(1, config.ranks // ranks_of_engine(config))
    return len(getattr(config.engine, "urls", ())) or int(getattr(config.engine, "replicas", 1))


def _adapted(config: RunConfig) -> tuple[str, ...]:
    """Names of the layers that an engine in another process must be ready to adapt; no weight is loaded for it."""
    if config.trainable.payload != "adapter" or ReportsChecksums not in config.engine.capabilities:
        return ()
    model = packing.bare(load_config(config.model), dtype=torch.float32, packing=config.packing)
    targets: Callable[[Any], Sequence[str]] = getattr(config.trainable, "targets", lambda _: ())
    return tuple(targets(model))


def started_on_ours(config: RunConfig, engine: Engine, restored: int) -> bool:
    """Whether the engine, as it started, holds the weights that the policy holds (adapters aside)."""
    if engine.started_elsewhere:
        return False
    return not restored or config.trainable.folder_name == "model" or config.trainable.payload == "adapter"
