"""A run on several ranks: the groups that each is in, its part of the optimizer, and the engines beside them."""

from __future__ import annotations

import asyncio
import copy
import os
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch._C._distributed_c10d import ErrorType

from tandem.config.loading import RunConfig
from tandem.config.sections import Distributed
from tandem.distributed import flight_recorder
from tandem.distributed.crew import Ranks, lead
from tandem.distributed.group import DataGroup
from tandem.distributed.placement import Placement, visible_accelerators
from tandem.distributed.shard_mesh import ShardMesh
from tandem.distributed.sharding import ShardedStepper
from tandem.engines.base import (
    EngineRequirements,
    EngineSpec,
    RankEngine,
    RankHosts,
)
from tandem.model.policy import Policy
from tandem.observability import waits
from tandem.optimizers.base import UpdatesParts
from tandem.trainer.live import rank_device
from tandem.trainer.pairs import has_engines_apart, has_engines_beside, has_slices, ranks_of_engine
from tandem.transport.daemon import on_daemon
from tandem.transport.rendezvous import Rendezvous, open_group, own_address

if TYPE_CHECKING:
    from tandem.distributed.weight_shards import ShardedPolicy, WeightShardStepper

T = TypeVar("T")

FAULT_POLL_SECONDS = 1.0
"""Between two looks at what NCCL's watchdog noted."""
_FAULTS = {
    ErrorType.TIMEOUT: "a collective of NCCL is not over after {seconds:g} s (distributed.timeout_seconds)",
    ErrorType.COMM_ERROR: "a collective of NCCL failed: the connection to another rank broke",
}


def world_of(together: Together | None) -> int:
    """How many ranks a run has."""
    return 1 if together is None else together.ranks.world


def engines_of(config: RunConfig, together: Together | None) -> EngineSpec:
    """The recipe's engine; of those that share ranks' weights one beside each rank or group of ranks."""
    engine: Any = config.engine
    if (world := world_of(together)) == 1:
        return config.engine
    if has_engines_apart(config):
        spec: EngineSpec = replace(engine, devices=devices_apart(config, world))
        return spec
    if not has_engines_beside(config):
        return config.engine
    each = ranks_of_engine(config)
    devices = tuple(engine_devices(first, each) for first in range(0, world, each)) if torch.cuda.is_available() else ()
    spec = replace(engine, replicas=world // each, devices=devices)
    return spec


def devices_apart(config: RunConfig, local_ranks: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each engine that is started apart from so many ranks of this host.

    They are the recipe's ``engine.devices``, or else the GPUs after the ranks'.
    """
    engine: Any = config.engine
    if engine.devices or engine.urls or config.distributed.share_gpus or not torch.cuda.is_available():
        return tuple(engine.devices)
    workers = engine.tensor_parallel_size
    return tuple(engine_devices(local_ranks + number * workers, workers) for number in range(engine.replicas))


def engine_devices(local_rank: int, ranks: int) -> str:
    """GPUs of so many ranks, the first of which is given, as CUDA_VISIBLE_DEVICES names them to their engine."""
    return ",".join(_device_name(rank) for rank in range(local_rank, local_rank + ranks))


def _device_name(local_rank: int) -> str:
    index = rank_device(local_rank).index
    visible = visible_accelerators(os.environ)
    return visible[index] if index < len(visible) else str(index)


@dataclass(slots=True, kw_only=True)
class RankParts:
    """What a rank has beside its policy."""

    group: DataGroup
    """For gradients and weights."""
    rendezvous: Rendezvous
    """Where its ranks met."""
    context: Any = None
    """The group of ranks that share this one's micro-batches; None: it shares none."""
    mesh: ShardMesh | None = None
    """All ranks, where weights are cut."""

    @classmethod
    async def join(
        cls,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        distributed: Distributed,
        logs: Path | None = None,
        workers: int = 1,
    ) -> RankParts:
        """``connect`` on a thread that is left behind when a rank is lost: nothing ends gloo's wait for that rank."""
        async with waits.waiting(waits.actor("trainer"), "their connection", on="the other ranks"):
            return await on_daemon(cls.connect, rendezvous, rank, device, distributed, logs, workers)

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        distributed: Distributed,
        logs: Path | None = None,
        workers: int = 1,
    ) -> RankParts:
        """Make every group of the ranks; all ranks call this together.

        Args:
            rendezvous: the ranks'.
            rank: this one's number.
            device: its accelerator, or the host.
            distributed: the recipe's section.
            logs: folder for the last collectives of NCCL, should a rank be lost; None: they are not recorded.
            workers: how many neighbouring ranks share an engine, each the slices of a worker; 1: none does.
        """
        data = Rendezvous(
            host=rendezvous.host,
            port=rendezvous.port,
            world=rendezvous.world,
            backend="nccl" if device.type == "cuda" and not distributed.share_gpus else "gloo",
            name=f"{rendezvous.name}-data",
            seconds=rendezvous.seconds,
        )
        if data.backend == "nccl" and logs is not None:
            flight_recorder.record(logs)
        group = DataGroup(data, rank, device)  # the first, since it tells this thread its device
        context, context_parallel = None, distributed.context_parallel
        if context_parallel > 1:
            some = replace(data, world=context_parallel, name=f"{rendezvous.name}-context-{rank // context_parallel}")
            context = open_group(some, rank % context_parallel, own_address(some), watched=True)
        parts = cls(group=group, rendezvous=data, context=context)
        if distributed.shard == "weights":
            parts.mesh = ShardMesh.of(data, group, data.world // distributed.replicas, workers)
        return parts

    def cut(self, policy: Policy, bare: nn.Module, whole: nn.Module | None) -> ShardedPolicy:
        """The policy cut, for an engine whose workers hold slices; all ranks call this together.

        Args:
            policy: all but its weights are taken over.
            bare: its model on the meta device, which becomes the cut one.
            whole: the lead's, which is emptied as all ranks take their parts of it; None on other ranks.
        """
        from tandem.distributed.sharded_weights import ShardedWeights
        from tandem.distributed.weight_shards import ShardedPolicy

        assert self.mesh is not None
        weights = ShardedWeights(bare, self.mesh.ranks, self.mesh.holders)
        weights.fill(whole)
        return ShardedPolicy(policy, weights)

    def bind(self, config: RunConfig, policy: Policy) -> tuple[Policy, ShardedStepper | WeightShardStepper]:
        """What this rank trains, and the optimizer of its parts.

        An adapter's states are small, and every rank has all of them.
        """
        optimizer = config.optimizer
        assert isinstance(optimizer, UpdatesParts)
        is_local = config.distributed.gradients == "local"
        if config.distributed.shard == "weights":
            return self._bound_shards(policy, optimizer, is_local)
        return policy, ShardedStepper(
            optimizer,
            config.trainable.parameters(policy.model),
            self.group,
            replicate=config.trainable.folder_name != "model",
            local=is_local,
        )

    @property
    def _backends(self) -> list[Any]:
        of_mesh = () if self.mesh is None else self.mesh.backends
        return [backend for backend in (self.group.backend, self.context, *of_mesh) if backend is not None]

    def _bound_shards(
        self, policy: Policy, optimizer: UpdatesParts, is_local: bool
    ) -> tuple[Policy, WeightShardStepper]:
        """Sharded weights and their optimizer.

        A policy that is not cut yet is the lead's own, for an engine in its process and for checkpoints, and stays as
        it is: a copy of it is cut.
        """
        from tandem.distributed.sharded_weights import ShardedWeights
        from tandem.distributed.weight_shards import ShardedPolicy, WeightShardStepper, WholeWeights

        if isinstance(policy, ShardedPolicy):
            return policy, WeightShardStepper(optimizer, policy, local=is_local)
        whole: dict[str, Any] = {}
        model = policy.model
        if self.group.rank == 0:
            whole = dict(model.named_parameters())
            model = copy.deepcopy(model)
        assert self.mesh is not None
        sharded = ShardedPolicy(policy, ShardedWeights(model, self.mesh.ranks))
        refresh = WholeWeights(sharded.weights, whole).refresh
        return sharded, WeightShardStepper(optimizer, sharded, refresh, local=is_local)

    def abort(self) -> None:
        """Give up what is under way in every group, so that nothing waits for a rank that is gone, and leave them."""
        for backend in self._backends:
            backend.abort()

    def give_up(self) -> None:
        """The same in a thread, once the last collectives are on disk: either may have to wait for the device."""
        number = self.group.rank if self.mesh is None else self.mesh.number  # by which torch compares the files

        def ended() -> None:
            flight_recorder.write(number)
            self.abort()

        threading.Thread(target=ended, name="abort of collectives").start()

    async def fault(self) -> str:
        """What NCCL's watchdog notes of a group's collectives, once it notes something; gloo raises by itself."""
        while True:
            if self.rendezvous.backend == "nccl":
                for backend in self._backends:
                    if (error := backend.get_error()) != ErrorType.SUCCESS:
                        return _FAULTS.get(error, str(error)).format(seconds=self.rendezvous.seconds)
            await asyncio.sleep(FAULT_POLL_SECONDS)


class Together:
    """The lead's commands around a run; those of a step are ``RankCrew``'s."""

    def __init__(self, ranks: Ranks, placement: Placement | None, *, ranks_of_engine: int = 1):
        self.ranks, self._ranks_of_engine = ranks, ranks_of_engine
        self.hosts: RankHosts | None = self if placement is not None and placement.has_several_hosts else None
        """Itself, where each rank starts the engine on its own host."""

    async def do(self, command: str, body: object, mine: Coroutine[object, object, T]) -> T:
        """Have every rank execute a command, the lead by ``mine``."""
        return (await self.ranks.execute(command, lambda rank: body, mine))[0]

    async def attach(self, exports: Sequence[Any], fresh: bool) -> None:
        """Have every other rank attach the weights of its engine."""
        await self.ranks.execute("attach", lambda rank: [exports[rank - 1], fresh], _noop())

    async def start_engines(self, requirements: EngineRequirements) -> Sequence[RankEngine]:
        """Have the first rank of each other engine start it, all at once."""
        body = {field: getattr(requirements, field) for field in _SENT_REQUIREMENTS}
        body["weights"] = None if requirements.weights is None else str(requirements.weights)
        _, replies = await self.ranks.execute("engine", lambda rank: body, _noop())
        return [RankEngine(**reply) for reply in replies if reply is not None]

    async def restart_engine(self, engine: int) -> RankEngine:
        """Have the first rank of one engine start it again."""
        rank = engine * self._ranks_of_engine
        _, replies = await self.ranks.execute("engine", lambda other: {} if other == rank else None, _noop())
        return RankEngine(**replies[rank - 1])

    async def adapt(self, slots: Sequence[Any]) -> None:
        """Have every other rank write its adapter into its engine's slot."""
        await self.ranks.execute("adapt", lambda rank: slots[rank - 1], _noop())

    async def fold(self, mine: Coroutine[Any, Any, None]) -> None:
        """Have every rank's model follow its parameters, the lead's by ``mine``."""
        await self.do("fold", None, mine)

    async def stage(self, folder: Path, mine: Coroutine[Any, Any, T]) -> T:
        """Have every rank stage its share of a checkpoint; the others then write theirs into its folder."""
        return await self.do("save", str(folder), mine)

    async def written(self) -> dict[str, str]:
        """Digests of what the others have written of the checkpoint that was staged.

        Raises:
            OSError: a rank's disk refuses, which is said once none of them writes any more.
        """
        reports = await self.ranks.reports("their files to be written")
        for rank, report in enumerate(reports, 1):
            if "error" in report:
                raise OSError(f"rank {rank}: {report['error']}")
        return {name: digest for report in reports for name, digest in report["digests"].items()}


_SENT_REQUIREMENTS = ("model", "dtype", "payload", "rank", "targets", "versions", "seed")
"""Plain fields of an engine's requirements; what else there is, a rank has itself."""


@asynccontextmanager
async def opened(
    config: RunConfig, world: int, placement: Placement | None, folder: Path
) -> AsyncIterator[Together | None]:
    """The other ranks of a run, connected; None where there are none."""
    if world == 1:
        yield None
        return
    # The folder's recipe: what the lead was given on its command line is in it.
    command = [sys.executable, "-m", "tandem", "train", str(folder / "config.yaml")]
    async with lead(world, placement, command, folder / "logs", config.distributed.timeout_seconds) as ranks:
        yield Together(ranks, placement, ranks_of_engine=ranks_of_engine(config))


async def load_weights(together: Together | None, config: RunConfig, folder: Path, step: int) -> None:
    """Have other ranks load the weights of the run's checkpoint of a step, which the lead has loaded; 0: none.

    Those whose weights are to be cut take them from the lead then.
    """
    if together is not None and not has_slices(config):
        path = str(_checkpoint(folder, step) / config.trainable.folder_name) if step else None
        await together.do("weights", path, _noop())


async def load_states(together: Together | None, folder: Path, step: int) -> None:
    """The same for their parts of the optimizer's states."""
    if together is not None:
        await together.do("restore", str(_checkpoint(folder, step)) if step else None, _noop())


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"{step:06d}"


async def _noop() -> None:
    """The lead's part in a command that is for the others."""
