"""One of several ranks: the groups that it is in, and its part of the weights and the optimizer."""

from __future__ import annotations

import asyncio
import copy
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._C._distributed_c10d import ErrorType

from tandem.config.loading import RunConfig
from tandem.config.sections import Distributed
from tandem.distributed import flight_recorder
from tandem.distributed.group import DataGroup
from tandem.distributed.shard_mesh import ShardMesh
from tandem.distributed.sharding import ShardedStepper
from tandem.model.policy import Policy
from tandem.observability import waits
from tandem.optimizers.base import UpdatesParts
from tandem.trainer.live import rank_device
from tandem.trainer.pairs import ranks_of_engine
from tandem.transport.daemon import on_daemon
from tandem.transport.rendezvous import Rendezvous, open_group, own_address

if TYPE_CHECKING:
    from tandem.distributed.weight_shards import ShardedPolicy, WeightShardStepper

FAULT_POLL_SECONDS = 1.0
"""Between two looks at what NCCL's watchdog noted."""
_FAULTS = {
    ErrorType.TIMEOUT: "a collective of NCCL is not over after {seconds:g} s (distributed.timeout_seconds)",
    ErrorType.COMM_ERROR: "a collective of NCCL failed: the connection to another rank broke",
}


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
        cls, config: RunConfig, rendezvous: Rendezvous, rank: int, local_rank: int, folder: Path
    ) -> RankParts:
        """``connect`` on a thread that is left behind when a rank is lost: nothing ends gloo's wait for that rank."""
        device, logs, workers = rank_device(local_rank), folder / "logs", ranks_of_engine(config)
        async with waits.waiting(waits.actor("trainer"), "their connection", on="the other ranks"):
            return await on_daemon(cls.connect, rendezvous, rank, device, config.distributed, logs, workers)

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
        backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" and not distributed.share_gpus else "gloo"
        data = replace(rendezvous, backend=backend, name=f"{rendezvous.name}-data")
        if data.backend == "nccl" and logs is not None:
            flight_recorder.record(logs)
        group = DataGroup(data, rank, device)  # the first, since it tells this thread its device
        context, context_parallel = None, distributed.context_parallel
        if context_parallel > 1:
            some = replace(data, world=context_parallel, name=f"{rendezvous.name}-context-{rank // context_parallel}")
            context = open_group(some, rank % context_parallel, own_address(some), watched=True)
        mesh = None
        if distributed.shard == "weights":
            mesh = ShardMesh.of(data, group, data.world // distributed.replicas, workers)
        return cls(group=group, rendezvous=data, context=context, mesh=mesh)

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
        from tandem.distributed.weight_shards import ShardedPolicy, WeightShardStepper

        if isinstance(policy, ShardedPolicy):
            return policy, WeightShardStepper(optimizer, policy, local=is_local)
        whole: dict[str, Any] = {}
        model = policy.model
        if self.group.rank == 0:
            whole = dict(model.named_parameters())
            model = copy.deepcopy(model)
        assert self.mesh is not None
        sharded = ShardedPolicy(policy, ShardedWeights(model, self.mesh.ranks))
        updated = partial(sharded.weights.copy_to, whole)
        return sharded, WeightShardStepper(optimizer, sharded, updated, local=is_local)

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
