"""The world of several ranks, as rank 0 leads them: each verb is a command that all of them execute."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from tandem.algorithms.references.base import ReferenceWeights
from tandem.config.build import encode
from tandem.config.loading import RunConfig
from tandem.distributed.crew import Ranks, lead
from tandem.distributed.placement import Placement
from tandem.engines.base import Engine, EngineRequirements, EngineSpec, RankEngine
from tandem.model.policy import Policy
from tandem.trainer.pairs import engines_of, has_engines_beside, has_slices, ranks_of_engine
from tandem.trainer.ranks.parts import RankParts
from tandem.trainer.ranks.slices import RankSlices, SharedSlices, TrainedSlices
from tandem.trainer.ranks.work import LeadWork
from tandem.trainer.step import LocalWork
from tandem.trainer.world import Hold, World, Write, live_policy
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.transaction.trained import Trained
from tandem.weight_sync.verify.checksums import Checksums, compare_checksums

T = TypeVar("T")

SENT_REQUIREMENTS = ("model", "dtype", "payload", "rank", "targets", "versions", "seed", "answers", "router_replay")
"""Plain fields of an engine's requirements; what else there is, a rank has itself."""


class ManyRanks(World):
    """Several ranks, each with the whole policy and a part of the optimizer's states.

    Args:
        config: the recipe.
        policy: rank 0's.
        ranks: all of them, connected.
        parts: what rank 0 has beside its policy.
        placement: where rank 0 is; None: all ranks are on this host.
    """

    def __init__(
        self, config: RunConfig, policy: Policy, ranks: Ranks, parts: RankParts, placement: Placement | None = None
    ):
        super().__init__(config, policy)
        self.ranks, self.parts, self.size = ranks, parts, ranks.world
        self._placement = placement

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, config: RunConfig, world: int, placement: Placement | None, folder: Path
    ) -> AsyncIterator[World]:
        """All ranks of a run, each with its policy; they end with the block."""
        # The folder's recipe: what the lead was given on its command line is in it.
        command = [sys.executable, "-m", "tandem", "train", str(folder / "config.yaml")]
        seconds = config.distributed.timeout_seconds
        async with lead(world, placement, command, folder / "logs", seconds) as ranks, AsyncExitStack() as stack:
            yield await cls.loaded(stack, config, ranks, placement, folder)

    @classmethod
    async def loaded(
        cls, stack: AsyncExitStack, config: RunConfig, ranks: Ranks, placement: Placement | None, folder: Path
    ) -> Self:
        """Have every rank load its policy and join its groups."""
        loading = stack.enter_async_context(live_policy(config, local_ranks=ranks.world))
        recipe = {"recipe": encode(config, complete=False), "folder": str(folder)}
        policy, _ = await ranks.execute("begin", lambda rank: recipe, loading)
        joining = RankParts.join(config, ranks.rendezvous, 0, 0)
        parts, _ = await ranks.execute("connect", None, joining)
        stack.callback(parts.abort)
        ranks.on_failure.append(parts.give_up)
        if parts.rendezvous.backend == "nccl":
            watching = asyncio.create_task(ranks.end_at(parts.fault()), name="NCCL's watchdog")
            stack.callback(watching.cancel)
        return cls(config, policy, ranks, parts, placement)

    async def watch(self, training: Coroutine[Any, Any, T]) -> T:
        """Await training, and give it up as soon as a rank is lost."""
        return await self.ranks.watch(training)

    async def _all(self, command: str, body: Any, here: Coroutine[Any, Any, T]) -> T:
        """Have every rank execute a command, this one by ``here``."""
        return (await self.ranks.execute(command, lambda rank: body, here))[0]

    async def _others(self, command: str, body: Callable[[int], Any]) -> list[Any]:
        """Have every other rank execute a command."""
        return (await self.ranks.execute(command, body, asyncio.sleep(0)))[1]

    # The engines and their weights

    async def start_engine(self, stack: AsyncExitStack, requirements: EngineRequirements) -> Engine:
        """Start the engines: those apart from ranks here, those beside ranks on each rank's host."""
        placement = self._placement
        several = placement is not None and placement.has_several_hosts
        hosts = self if several and has_engines_beside(self.config) else None
        return await super().start_engine(stack, replace(requirements, hosts=hosts))

    @property
    def engine(self) -> EngineSpec:
        """The recipe's engine, as often as ranks need it."""
        local_ranks = self.size if self._placement is None else self._placement.local_world_size
        return engines_of(self.config, self.size, local_ranks)

    async def start_engines(self, requirements: EngineRequirements) -> Sequence[RankEngine]:
        """Have the first rank of each other engine start it, all at once."""
        body = {field: getattr(requirements, field) for field in SENT_REQUIREMENTS}
        body["weights"] = None if requirements.weights is None else str(requirements.weights)
        return [RankEngine(**reply) for reply in await self._others("engine", lambda rank: body) if reply is not None]

    async def restart_engine(self, engine: int) -> RankEngine:
        """Have the first rank of one engine start it again."""
        rank = engine * ranks_of_engine(self.config)
        replies = await self._others("engine", lambda other: {} if other == rank else None)
        return RankEngine(**replies[rank - 1])

    def trained(self) -> Trained:
        """The weights or the adapter. Where other ranks have no engine whose bytes would tell, theirs are compared."""
        alike = self.config.distributed.shard == "states" and not has_engines_beside(self.config)
        return TrainedAlike(self.config.trainable, self.policy, self.ranks) if alike else super().trained()

    async def attach(self, exports: Sequence[Any], fresh: bool) -> None:
        """Have every other rank attach the weights of its engine."""
        await self._others("attach", lambda rank: [exports[rank - 1], fresh])

    async def adapt(self, slots: Sequence[Any]) -> None:
        """Have every other rank write its adapter into its engine's slot."""
        await self._others("adapt", lambda rank: slots[rank - 1])

    async def fold(self, here: Coroutine[Any, Any, None]) -> None:
        """Have every rank's model follow its parameters, that of this one by ``here``."""
        await self._all("fold", None, here)

    # The step

    async def bind(self, reference: ReferenceWeights | None) -> LocalWork:
        """Bind the optimizer, of which every rank has a part; the work of a step on all ranks."""
        binding = self.policy.compute(self.parts.bind, self.config, self.policy, reference)
        policy, stepper = await self._all("bind", None, binding)
        of_ranks = {"ranks": self.ranks, "context_parallel": self.config.distributed.context_parallel}
        return LeadWork.of(self.config, policy, stepper, reference, context=self.parts.context, **of_ranks)

    # Checkpoints

    async def load_weights(self, path: Path) -> None:
        """Have every other rank load the weights of a checkpoint."""
        await self._others("weights", lambda rank: str(path))

    async def load_states(self, checkpoint: Path) -> None:
        """Have every other rank load its part of the optimizer's states."""
        await self._others("restore", lambda rank: str(checkpoint))

    async def save(self, folder: Path, here: Coroutine[Any, Any, T]) -> T:
        """Have every rank stage its share, this one by ``here``; the others then write theirs."""
        return await (self._all("save", str(folder), here) if self.saves_everywhere else here)

    async def written(self) -> None:
        """Wait until other ranks have written what they staged.

        Raises:
            OSError: the disk of one refuses, which is said once none of them writes any more.
        """
        reports = await self.ranks.reports("their files to be written") if self.saves_everywhere else []
        for rank, error in enumerate(reports, 1):
            if error is not None:
                raise OSError(f"rank {rank}: {error}")

    @property
    def saves_everywhere(self) -> bool:
        """Whether other ranks have a part of what is saved: not where weights alone are."""
        return self.config.checkpoint.save == "all"


class TrainedAlike(Trained):
    """What every rank holds alike, as the lead publishes it."""

    def __init__(self, trainable: Any, policy: Policy, ranks: Ranks):
        super().__init__(trainable, policy)
        self._ranks = ranks

    async def checksums(self) -> Checksums:
        """Checksums of the lead's bytes, once those of every other rank are the same."""
        sums, others = await self._ranks.execute("checksums", None, super().checksums())
        of_ranks = {f"rank {rank}": each for rank, each in enumerate(others, 1)}
        compare_checksums(sums, of_ranks, "trained tensors", "go on from the newest checkpoint, which every rank loads")
        return sums


class CutRanks(ManyRanks):
    """Several ranks whose weights are cut, with engines beside or apart from them: none of them has all weights."""

    _rank: RankSlices

    async def start_engine(self, stack: AsyncExitStack, requirements: EngineRequirements) -> Engine:
        """Start the engines, and cut the policy among the ranks."""
        engine, whole = await super().start_engine(stack, requirements), self.policy
        cutting = whole.compute(self.parts.cut, whole, self.config.trainable)
        self.policy = cut = await self._all("cut", None, cutting)
        self._rank = RankSlices(cut, whole.causal)
        return engine

    @property
    def sync(self) -> WeightSync:
        """The recipe's, by slices where each rank has a worker beside it."""
        return SharedSlices.of(self.config.sync) if has_slices(self.config) else self.config.sync

    def trained(self) -> Trained:
        """The weights of all ranks."""
        return TrainedSlices(self.config.trainable, self._rank, self.ranks)

    async def load_weights(self, path: Path) -> None:
        """Nothing: other ranks take theirs from this one when it is cut."""

    @property
    def saves_everywhere(self) -> bool:
        """Whether other ranks have a part of what is saved: of an adapter each has all."""
        return super().saves_everywhere or self.config.trainable.folder_name == "model"

    def stage_weights(self, hold: Hold) -> Write:
        """Gather this rank's share, and write it as one of the model's files."""
        trainable, tokenizer = self.config.trainable, self.policy.tokenizer
        if trainable.folder_name != "model":
            return super().stage_weights(hold)
        write = self._rank.stage()

        def written(folder: Path) -> None:
            write(folder / trainable.folder_name)
            tokenizer.save_pretrained(folder / trainable.folder_name)

        return written
