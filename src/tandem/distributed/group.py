"""The ranks' groups, by NCCL on GPUs and by gloo on processors: for gradients and whole weights, and for cut ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.distributed.slices import shard_number
from tandem.observability import waits
from tandem.transport.rendezvous import Rendezvous, open_group, own_address, unsupervised, visit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def broke_off(error: BaseException) -> bool:
    """Whether an error says that a collective broke off, as it does on every rank where one of them is gone.

    NCCL's errors have a type of their own, and of gloo's only the text says so.
    """
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


class DataGroup:
    """One rank's place in the group. Every rank makes the same calls in the same order.

    Args:
        rendezvous: where the group's store is, and how long a collective may take.
        rank: of this process.
        device: where the tensors are.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device):
        self.rank, self.world, self.device = rank, rendezvous.world, device
        self._seconds = rendezvous.seconds
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._group = self.backend = open_group(rendezvous, rank, own_address(rendezvous), watched=True)
        self.finish([self.all_reduce(torch.zeros(1, device=device))], "their connection")

    def reduce_scatter(self, run: Tensor, rows: Tensor) -> Any:
        """Begin to sum ``rows`` [world, width] over all ranks; ``own`` [width] becomes this rank's row of the sum."""
        return self._group._reduce_scatter_base(run, rows.view(-1), dist.ReduceScatterOptions())

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> Any:
        """Begin to make every rank's tensor the sum, or the largest, of all ranks'."""
        return self._group.allreduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)

    def all_gather(self, wholes: Sequence[Tensor]) -> None:
        """Fill flat tensors, of which every rank has written its own part in place: part r of as many equal parts."""
        of_bytes = [whole.view(torch.uint8) for whole in wholes]
        works = [self._group._allgather_base(whole, whole.chunk(self.world)[self.rank]) for whole in of_bytes]
        self.finish(works, "their parts of the weights")

    def finish(self, works: Sequence[Any], reason: str) -> None:
        """Have what comes next wait for collectives: gloo's here, and NCCL's on the device alone.

        Args:
            works: in the order in which they were begun.
            reason: what they bring, as ``tandem why`` tells it.
        """
        with waits.blocking(f"rank {self.rank}", reason, on="the other ranks", deadline=self._seconds):
            for work in works:
                work.wait()


class ShardMesh(NamedTuple):
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
