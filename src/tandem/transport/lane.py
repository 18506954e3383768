"""What a member of a broadcast group has of its own: the process group, a stream beside the caller's, and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.errors import TransportError
from tandem.transport.buckets import Plan

SLOTS = 2
"""Buckets whose memory is in use at a time: one is packed or unpacked while another is on the wire."""
AHEAD = 8
"""Buckets that a GPU is given before the first has arrived: enough to work on while this thread is held up."""


class Flight(NamedTuple):
    """A bucket on its way."""

    works: list[Any]
    """torch's handles of it."""
    views: list[tuple[str, Tensor]]
    """What it carries, by name; keeps the memory."""
    doing: str = ""
    """For messages."""


class Lane:
    """Buckets in flight. All errors of torch come out as they are: RuntimeError.

    Args:
        device: where the tensors are.
        nccl: whether NCCL carries them; otherwise gloo, through host memory.
    """

    def __init__(self, device: torch.device, *, nccl: bool):
        if nccl and (device.type != "cuda" or not dist.is_nccl_available()):
            raise TransportError(f"backend nccl needs CUDA and a torch built with it; on {device} use backend gloo")
        if device == torch.device("cuda"):  # as tensors name theirs
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.wire = device if nccl else torch.device("cpu")
        """Where what is transferred must be."""
        self.group: Any = None
        self._stream = torch.cuda.Stream(device) if nccl else None
        self._slots: list[Tensor | None] = [None] * SLOTS

    @property
    def nccl(self) -> bool:
        """Whether transfers are a GPU's work, which this thread need not wait for."""
        return self._stream is not None

    def free(self) -> None:
        """Let go of memory."""
        self._slots = [None] * SLOTS

    def first(self) -> Flight:
        """A transfer of one byte, with which nccl makes its connections."""
        return Flight([_from_rank_0(self.group, torch.zeros(1, dtype=torch.uint8, device=self.wire))], [])

    def straight(self, plan: Plan, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the tensors that can be sent or received as they lie."""
        parts = [p for bucket in plan.buckets for p in bucket.parts if p.alone and p.name in wanted]
        return {
            p.name: t
            for p, t in ((p, wanted[p.name]) for p in parts)
            if (t.device, tuple(t.shape), t.dtype) == (self.wire, p.shape, p.dtype) and t.is_contiguous()
        }

    def launch(
        self,
        plan: Plan,
        index: int,
        own: Mapping[str, Tensor],
        *,
        tensors: Mapping[str, Tensor] | None = None,
        before: Sequence[Flight] = (),
        keep: bool = False,
    ) -> Flight:
        """Put a bucket on the wire.

        Args:
            plan: the publish.
            index: which bucket.
            own: tensors that need not be packed.
            tensors: rank 0's, all of them.
            before: flights that have used the same memory and may not be over.
            keep: use memory that nothing else will use.
        """
        bucket = plan.buckets[index]
        memory = self._memory(index, bucket.staged(own), plan.bucket_bytes, keep=keep)
        views = bucket.views(memory, own)
        with self.side():
            if tensors is not None:
                for flight in before:
                    self.behind(flight)
                _copy([(view, tensors[name]) for name, view in views if view is not own.get(name)])
            return Flight(self._broadcast(bucket.pieces(memory, own)), views)

    def _memory(self, index: int, size: int, most: int, *, keep: bool) -> Tensor:
        """Bytes for one bucket: one of two that are kept, or memory of its own for a tensor larger than those."""
        slot = index % SLOTS
        memory = self._slots[slot]
        if keep or memory is None or memory.numel() < size:
            pinned = self.wire != self.device
            memory = torch.empty(size, dtype=torch.uint8, device=self.wire, pin_memory=pinned)
            if size <= most and not keep:
                self._slots[slot] = memory
        return memory

    def _broadcast(self, pieces: list[Tensor]) -> list[Any]:
        if not self.nccl or len(pieces) == 1:
            return [_from_rank_0(self.group, piece) for piece in pieces]
        self.group._start_coalescing()  # nccl then moves all by one kernel
        try:
            for piece in pieces:
                _from_rank_0(self.group, piece)
        finally:
            work = self.group._end_coalescing()  # else whatever this thread asks of nccl later would be held back
        return [work]

    def behind(self, flight: Flight) -> None:
        """Have the current stream wait for it; for gloo, which has none, this thread. Raises what went wrong."""
        for work in flight.works:
            work.wait()

    def over(self, flight: Flight) -> bool:
        """Whether it has ended, well or not."""
        return all(work.is_completed() for work in flight.works)

    def check(self, flight: Flight) -> None:
        """Raise what went wrong with one that is over."""
        with self.side():
            self.behind(flight)
        if self.nccl and (state := self.group.get_error().name) != "SUCCESS":
            raise RuntimeError(f"nccl reports {state}")

    def mark(self) -> Any:
        """An event behind what the current stream was given; None where there is no stream."""
        return torch.cuda.current_stream(self.device).record_event() if self.nccl else None

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        """On CUDA, a stream beside the caller's, behind all that the caller's was given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _from_rank_0(group: Any, piece: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([piece], options)
