"""Checksums of a rank's shards as they are published: rounded a few at a time, into memory that is used again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tandem.transport.checksums import ChecksumTally, Shard

ROUNDED_BYTES = 1 << 26
"""Of rounded weights at once, about what a GPU's cache holds: no second copy of a rank's weights is kept for it."""

_ALIGNED = 16
"""Elements of the memory at whose multiples shards begin: a kernel then loads 16 bytes at once."""


class RoundedSums:
    """Checksums of shards in a dtype, taken often; on a GPU they are queued, and nothing waits for one of them.

    Args:
        shards: in wider types or the same; their memory must stay where it is.
        dtype: to which they are rounded.
        rounded_bytes: at once; a row of a shard must not have more.
    """

    def __init__(self, shards: Iterable[Shard], dtype: torch.dtype, rounded_bytes: int = ROUNDED_BYTES):
        shards = list(shards)
        self._device = shards[0].tensor.device
        self.names = [shard.name for shard in shards]
        """Of the shards."""
        self._rounds: list[tuple[list[Tensor], list[Tensor], ChecksumTally]] = []
        pieces: list[tuple[int, Shard]] = []
        if all(shard.tensor.dtype == dtype for shard in shards):
            pieces = list(enumerate(shards))
            self._rounds.append(([], [], ChecksumTally(shards)))
        else:
            most = rounded_bytes // dtype.itemsize
            widest = max(shard.tensor[:1].numel() for shard in shards)
            buffer = torch.empty(max(most, widest), dtype=dtype, device=self._device)
            pieces = [(i, piece) for i, shard in enumerate(shards) for piece in _pieces(shard, len(buffer))]
            self._fill([piece for _, piece in pieces], buffer)
        self._owners = torch.tensor([i for i, _ in pieces], dtype=torch.int64, device=self._device)

    def _fill(self, pieces: list[Shard], buffer: Tensor) -> None:
        """Plan which pieces share the buffer."""
        sources, places, rounded, at = list[Tensor](), list[Tensor](), list[Shard](), 0
        for piece in pieces:
            size = piece.tensor.numel()
            if at + size > len(buffer):
                self._rounds.append((places, sources, ChecksumTally(rounded)))
                sources, places, rounded, at = [], [], [], 0
            place = buffer[at : at + size].view(piece.tensor.shape)
            at += -(-size // _ALIGNED) * _ALIGNED
            sources.append(piece.tensor)
            places.append(place)
            rounded.append(Shard(piece.name, place, piece.first))
        if rounded:
            self._rounds.append((places, sources, ChecksumTally(rounded)))

    @torch.no_grad()
    def queue(self) -> Tensor:
        """The checksum of every shard, in their order: int64 that have the bits of it."""
        sums = []
        for places, sources, tally in self._rounds:
            if places:
                torch._foreach_copy_(places, sources)
            sums.append(tally.queue().to(self._device))
        total = torch.zeros(len(self.names), dtype=torch.int64, device=self._device)
        return total.index_add_(0, self._owners, torch.cat(sums)) if sums else total


def _pieces(shard: Shard, most: int) -> Iterable[Shard]:
    """Runs of a shard's rows, of so many elements at most; none of an empty one."""
    tensor, (row, column) = shard.tensor, shard.first
    if not tensor.numel():
        return
    height = max(1, most // tensor[0].numel())
    for top in range(0, len(tensor), height):
        yield Shard(shard.name, tensor[top : top + height], (row + top, column))
