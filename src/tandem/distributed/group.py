"""The ranks' data group: collectives on gradients and weights, by NCCL on GPUs and by gloo on processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.observability import waits
from tandem.transport.rendezvous import Rendezvous, open_group, own_address


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
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return self._group.allreduce([tensor], options)

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
