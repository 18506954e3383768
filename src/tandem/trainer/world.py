"""The world of a run: the ranks that train its policy, here one.

A run chooses its world once, at its start (``assemble.py``), and what concerns all ranks is asked of it: loading and
binding the policy, starting engines, weights for their sync, checkpoints. ``ranks/lead.py`` has the world of several
ranks. Nobody else knows how many there are, or that one of them has all weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from tandem.algorithms.references.base import ReferenceWeights
from tandem.config.loading import RunConfig
from tandem.engines.base import Engine, EngineRequirements, EngineSpec
from tandem.model.policy import Policy
from tandem.trainer import memory_plan
from tandem.trainer.live import live_policy
from tandem.trainer.step import LocalWork
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.transaction.trained import Trained

T = TypeVar("T")

Hold = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Tensors as they are now, as ``Staging.hold`` keeps them."""
Write = Callable[[Path], object]
"""Writes what was staged into a folder."""


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
