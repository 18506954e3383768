"""One of several ranks: the groups that it is in, and its part of the weights and the optimizer."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ErrorType
from torch.nn import Parameter

from tandem.algorithms.references.base import ReferenceWeights
from tandem.config.loading import RunConfig
from tandem.config.sections import Distributed
from tandem.distributed.group import DataGroup, ShardMesh
from tandem.distributed.sharded_weights import ShardedWeights
from tandem.distributed.sharding import ShardedStepper
from tandem.distributed.weight_shards import ShardedPolicy, WeightShardStepper
from tandem.model.policy import Policy
from tandem.observability import waits
from tandem.optimizers.base import UpdatesParts
from tandem.trainable.base import Trainable
from tandem.trainer.pairs import ranks_of_engine
from tandem.trainer.world import rank_device
from tandem.transport.daemon import on_daemon
from tandem.transport.rendezvous import Rendezvous, open_group, own_address

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
    async def join(cls, config: RunConfig, rendezvous: Rendezvous, rank: int, local_rank: int) -> RankParts:
        """``connect`` on a thread that is left behind when a rank is lost: nothing ends gloo's wait for that rank."""
        device, workers = rank_device(local_rank), ranks_of_engine(config)
        async with waits.waiting(waits.actor("trainer"), "their connection", on="the other ranks"):
            return await on_daemon(cls.connect, rendezvous, rank, device, config.distributed, workers)

    @classmethod
    def connect(
        cls, rendezvous: Rendezvous, rank: int, device: torch.device, distributed: Distributed, workers: int = 1
    ) -> RankParts:
        """Make every group of the ranks; all ranks call this together.

        Args:
            rendezvous: the ranks'.
            rank: this one's number.
            device: its accelerator, or the host.
            distributed: the recipe's section.
            workers: how many neighbouring ranks share an engine, each the slices of a worker; 1: none does.
        """
        backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
        data = replace(rendezvous, backend=backend, name=f"{rendezvous.name}-data")
        group = DataGroup(data, rank, device)  # the first, since it tells this thread its device
        context, context_parallel = None, distributed.context_parallel
        if context_parallel > 1:
            some = replace(data, world=context_parallel, name=f"{rendezvous.name}-context-{rank // context_parallel}")
            context = open_group(some, rank % context_parallel, own_address(some), watched=True)
        mesh = None
        if distributed.shard == "weights":
            mesh = ShardMesh.of(data, group, data.world // distributed.replicas, workers)
        return cls(group=group, rendezvous=data, context=context, mesh=mesh)

    def cut(self, policy: Policy, trainable: Trainable) -> ShardedPolicy:
        """The policy cut; all ranks call this together.

        Args:
            policy: all but its weights are taken over. The lead's is emptied as all ranks take their parts of it; that
                of others is on the meta device.
            trainable: the recipe's.
        """
        assert self.mesh is not None
        whole = policy.model if self.group.rank == 0 else None
        if whole is not None:
            trainable.unfold(whole)
        live = policy.model.parameters()
        memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in live}
        bare = copy.deepcopy(policy.model, memo)
        weights = ShardedWeights(bare, self.mesh.ranks, trainable.base_names, self.mesh.holders)
        weights.fill(whole)
        return _cut_policy(policy, weights, trainable)

    def bind(
        self, config: RunConfig, policy: Policy, reference: ReferenceWeights | None
    ) -> tuple[Policy, ShardedStepper | WeightShardStepper]:
        """What this rank trains, and the optimizer of its parts; a reference is cut as the weights are.

        An adapter's states are small, and every rank has all of them.
        """
        optimizer = config.optimizer
        assert isinstance(optimizer, UpdatesParts)
        is_local = config.distributed.gradients == "local"
        is_adapter = config.trainable.folder_name != "model"
        hooks: dict[str, Callable[[], None]] = {}
        if config.distributed.shard == "weights":
            if isinstance(policy, ShardedPolicy):
                updated = policy.weights.reshard
            else:
                policy, updated = self._copied(policy, config.trainable)
            if reference is not None:
                self._cut_reference(reference, policy)
            if not is_adapter:
                return policy, WeightShardStepper(optimizer, policy, updated, local=is_local)
            hooks = {"stand_in": policy.stand_in, "updated": updated}
        named = config.trainable.parameters(policy.model)
        return policy, ShardedStepper(optimizer, named, self.group, replicate=is_adapter, local=is_local, **hooks)

    @property
    def _backends(self) -> list[Any]:
        of_mesh = () if self.mesh is None else self.mesh.backends
        return [backend for backend in (self.group.backend, self.context, *of_mesh) if backend is not None]

    def _copied(self, policy: Policy, trainable: Trainable) -> tuple[ShardedPolicy, Callable[[], None]]:
        """A policy cut for training alone, and what has the whole one follow it.

        The lead's whole weights are for an engine in its process and for checkpoints, so a copy of them is cut. An
        adapter is one for both.
        """
        assert self.mesh is not None
        whole: dict[str, Any] = {}
        model = policy.model
        if self.group.rank == 0:
            whole = dict(trainable.base_names(model))
            adapter = trainable.parameters(model) if trainable.folder_name != "model" else []
            model = copy.deepcopy(model, {id(p): p for _, p in adapter})
        trainable.unfold(model)
        weights = ShardedWeights(model, self.mesh.ranks, trainable.base_names)
        sharded = _cut_policy(policy, weights, trainable)

        def updated() -> None:
            weights.reshard()
            trainable.fold(sharded.model)
            weights.copy_to(whole)

        return sharded, updated

    def _cut_reference(self, reference: ReferenceWeights, policy: ShardedPolicy) -> None:
        """Send the lead's reference to all ranks: cut weights by parts, an adapter whole."""
        weights, model, is_lead = policy.weights, policy.model, self.group.rank == 0
        shards = weights.shards()

        def part(name: str, whole: Tensor) -> tuple[Parameter, Tensor]:
            sent = whole if is_lead else None
            if name in shards:
                live = Parameter(shards[name], requires_grad=False)
                return live, weights.part_sent(name, sent).to(live.dtype, copy=True)
            live = model.get_parameter(name)
            return live, weights.sent(sent, live.shape, live.dtype).clone()

        reference.cut(part, weights.reshard)

    def abort(self) -> None:
        """Give up what is under way in every group, so that nothing waits for a rank that is gone, and leave them."""
        for backend in self._backends:
            backend.abort()

    def give_up(self) -> None:
        """The same in a thread: it may have to wait for the device."""
        threading.Thread(target=self.abort, name="abort of collectives").start()

    async def fault(self) -> str:
        """What NCCL's watchdog notes of a group's collectives, once it notes something; gloo has none, and raises."""
        while True:
            for backend in self._backends:
                if (error := backend.get_error()) != ErrorType.SUCCESS:
                    return _FAULTS.get(error, str(error)).format(seconds=self.rendezvous.seconds)
            await asyncio.sleep(FAULT_POLL_SECONDS)


def _cut_policy(policy: Policy, weights: ShardedWeights, trainable: Trainable) -> ShardedPolicy:
    """A policy with cut weights, from which what is folded into them has been taken."""

    def part(name: str) -> tuple[slice, slice]:
        of = weights.part(name)
        return slice(of.rows.start, of.rows.stop), slice(of.columns.start, of.columns.stop)

    trainable.cut(weights.model, part)
    trainable.fold(weights.model)
    return ShardedPolicy(policy, weights)
