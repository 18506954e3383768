"""Layout of tensors for a broadcast: packed in buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tandem.errors import TransportError
from tandem.lazy import Tensor, torch

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes; more than any dtype or vector load needs


class TensorEntry(NamedTuple):
    """One tensor of a publish."""

    name: str
    """Its name for both sides."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name of its dtype, such as ``bfloat16``."""

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def manifest(named: Iterable[tuple[str, Tensor]]) -> list[TensorEntry]:
    """Manifest that ``receive`` needs of the tensors that ``send`` gets, in the same order."""
    return [TensorEntry(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named]


class Bucket:
    """Tensors that travel in one piece."""

    def __init__(self) -> None:
        self.parts: list[tuple[TensorEntry, int]] = []
        """Each with its first byte, in the order of the manifest."""
        self.size = 0
        """Bytes of all."""

    def add(self, entry: TensorEntry) -> None:
        """Give one tensor more its place."""
        start = _aligned(self.size)
        self.parts.append((entry, start))
        self.size = start + entry.bytes

    def views(self, memory: Tensor) -> list[tuple[str, Tensor]]:
        """Every tensor by name, in the bucket's memory."""
        return [
            (entry.name, memory[start : start + entry.bytes].view(getattr(torch, entry.dtype)).view(entry.shape))
            for entry, start in self.parts
        ]


class BucketPlan:
    """A publish, bucket by bucket; a function of the manifest and of the bucket's size alone.

    Raises:
        TransportError: names an entry that cannot travel.
    """

    def __init__(self, entries: Iterable[TensorEntry], bucket_bytes: int):
        self.entries = list(entries)
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        """Tensors in order; one that is larger than a bucket gets its own, as large as itself."""
        for entry in self.entries:
            name, shape, kind = entry
            if not isinstance(getattr(torch, kind, None), torch.dtype) or min(shape, default=1) < 1:
                raise TransportError(f"{name!r} cannot travel: expected torch dtype and elements, got {kind}{[*shape]}")
            if not self.buckets or _aligned(self.buckets[-1].size) + entry.bytes > bucket_bytes:
                self.buckets.append(Bucket())
            self.buckets[-1].add(entry)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.bytes for entry in self.entries)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
