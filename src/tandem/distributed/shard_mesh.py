"""The ranks among which weights are cut, as torch's groups: a mesh for FSDP, and who has a worker's slice together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.distributed.group import DataGroup
from tandem.distributed.slices import shard_number
from tandem.transport.rendezvous import Rendezvous, unsupervised, visit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMesh:
    """All ranks as FSDP wants them, by the numbers of their shards, in torch's default group."""

    ranks: DeviceMesh
    """Of one dimension, or of two: replicas, and the shards of each."""
    number: int
    """Of this rank's shard."""
    holders: Any
    """Group of the ranks whose shards are together the slice of this one's worker; None where one shard is."""
    backends: tuple[Any, ...]
    """Of all groups that are used."""

    @classmethod
    def of(cls, rendezvous: Rendezvous, group: DataGroup, shards: int, workers: int) -> ShardMesh:
        """Make the groups; all ranks call this together.

        Args:
            rendezvous: where they meet.
            group: all ranks.
            shards: of each replica.
            workers: of each engine whose slices ranks write; 1: there is none.
        """
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if dist.is_initialized():
            dist.destroy_process_group()
        timeout, kind = timedelta(seconds=rendezvous.seconds), group.device.type
        number, num_holders = shard_number(group.rank, shards, workers), shards // workers
        numbers = torch.arange(group.world)

        def groups_of(rows: Tensor) -> Any:  # by torch itself they would have timeouts of its own
            return dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0]

        with unsupervised():
            dist.init_process_group(
                rendezvous.backend,
                store=dist.PrefixStore("default", visit(rendezvous)),  # type: ignore[attr-defined]
                rank=number,
                world_size=group.world,
                timeout=timeout,
            )
            groups: list[Any] = [dist.group.WORLD]
            if shards == group.world:
                mesh = init_device_mesh(kind, (shards,))
            else:
                rows = numbers.view(-1, shards)
                groups += [groups_of(rows.T), groups_of(rows)]
                mesh = DeviceMesh.from_group(groups[1:], kind, mesh=rows, mesh_dim_names=("replicas", "shards"))
            holders = None
            if workers > 1 and num_holders > 1:
                groups.append(holders := groups_of(numbers.view(-1, num_holders)))
        backends = tuple(each._get_backend(group.device) for each in groups)
        return cls(ranks=mesh, number=number, holders=holders, backends=backends)
