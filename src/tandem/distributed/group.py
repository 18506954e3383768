"""The ranks' data group: collectives on gradients and weights, by NCCL where each rank has a GPU of its own.

By gloo elsewhere: on processors, and where ranks share a GPU, which NCCL refuses. gloo is handed host memory alone, so
what is on a GPU is copied there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.observability import waits
from tandem.transport.rendezvous import Rendezvous, open_group, own_address


def needs_staging(tensor: Tensor) -> bool:
    """Whether gloo needs a copy of a tensor in host memory."""
    return tensor.is_cuda


def on_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor of a GPU in host memory."""
    return tensor.cpu()


def broke_off(error: BaseException) -> bool:
    """Whether an error says that a collective broke off, as it does on every rank where one of them is gone.

    NCCL's errors have a type of their own, and of gloo's only the text says so.
    """
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


class HostWork:
    """A collective of gloo under way, whose result is copied to where it belongs when it is waited for."""

    def __init__(self, work: Any, result: Tensor, target: Tensor, sent: Tensor | None = None):
        self._work, self._result, self._target = work, result, target
        self._sent = sent  # which gloo may read until then

    def wait(self) -> None:
        """Return once ``target`` has the result."""
        self._work.wait()
        if self._result is not self._target:
            self._target.copy_(self._result)


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
        self._through_host = rendezvous.backend == "gloo"
        self._group = self.backend = open_group(rendezvous, rank, own_address(rendezvous), watched=True)
        self.finish([self.all_reduce(torch.zeros(1, device=device))], "their connection")

    def reduce_scatter(self, run: Tensor, rows: Tensor) -> Any:
        """Begin to sum ``rows`` [world, width] over all ranks; ``own`` [width] becomes this rank's row of the sum."""
        to, options = self._staged(run, copied=False), dist.ReduceScatterOptions()
        sent = self._staged(rows.view(-1))
        return HostWork(self._group._reduce_scatter_base(to, sent, options), to, run, sent)

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> Any:
        """Begin to make every rank's tensor the sum, or the largest, of all ranks'."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        staged = self._staged(tensor)
        return HostWork(self._group.allreduce([staged], options), staged, tensor)

    def all_gather(self, wholes: Sequence[Tensor]) -> None:
        """Fill flat tensors, of which every rank has written its own part in place: part r of as many equal parts."""
        works: list[HostWork] = []
        for whole in (whole.view(torch.uint8) for whole in wholes):
            to, sent = self._staged(whole, copied=False), self._staged(whole.chunk(self.world)[self.rank])
            works.append(HostWork(self._group._allgather_base(to, sent), to, whole, sent))
            if self._through_host:  # whose copies are as large as what they stand for
                self.finish([works.pop()], "their parts of the weights")
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

    def _staged(self, tensor: Tensor, *, copied: bool = True) -> Tensor:
        """The tensor where the backend can take it: itself, or host memory with, or without, a copy of it."""
        if not self._through_host or not needs_staging(tensor):
            return tensor
        return on_host(tensor) if copied else torch.empty(tensor.shape, dtype=tensor.dtype)
