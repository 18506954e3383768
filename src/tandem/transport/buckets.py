"""Layout of tensors for a broadcast: in buckets, small ones packed, large ones in place."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tandem.errors import TransportError
from tandem.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 64 << 20
_ALONE = 4 << 20  # bytes from which on a tensor is worth a transfer of its own, which spares packing it
_ALIGNMENT = 64  # bytes; more than any dtype or vector load needs


class TensorEntry(NamedTuple):
    """One tensor of a publish."""

    name: str
    """Its name for both sides."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name of its dtype, such as ``bfloat16``."""


def manifest(named: Iterable[tuple[str, Tensor]]) -> list[TensorEntry]:
    """Manifest that ``receive`` needs of the tensors that ``send`` gets, in the same order."""
    return [TensorEntry(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named]


class BucketPart(NamedTuple):
    """A tensor's place in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Its first byte, where it passes through the bucket's memory."""
    size: int
    """Bytes."""
    alone: bool
    """It travels by itself, and so need not pass through the bucket's memory."""

    @property
    def stop(self) -> int:
        """Behind its last byte."""
        return self.start + self.size


class Bucket:
    """Tensors that travel at once: those that are packed in one piece, the others in a piece each."""

    def __init__(self, sized: Iterable[tuple[TensorEntry, torch.dtype, int]]):
        self.parts: list[BucketPart] = []
        """In the order of the manifest."""
        sized = list(sized)
        starts: dict[int, int] = {}
        self.size = self.packed = 0
        """Bytes of all, and of those that are packed, which come first."""
        for alone in (False, True):
            for index, (_, _, size) in enumerate(sized):
                if (size >= _ALONE) == alone:
                    starts[index] = _aligned(self.size)
                    self.size = starts[index] + size
            self.packed = self.packed if alone else self.size
        for index, (entry, dtype, size) in enumerate(sized):
            self.parts.append(BucketPart(entry.name, entry.shape, dtype, starts[index], size, size >= _ALONE))

    def staged(self, own: Mapping[str, Tensor]) -> int:
        """Bytes of memory that it passes through where these tensors, by name, are sent or received as they lie."""
        return max((p.stop for p in self.parts if not (p.alone and p.name in own)), default=0)

    def views(self, memory: Tensor, own: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Every tensor by name: one's own, or its place in the bucket's memory."""
        typed: dict[torch.dtype, Tensor] = {}
        out = []
        for part in self.parts:
            if part.alone and part.name in own:
                out.append((part.name, own[part.name]))
                continue
            if part.dtype not in typed:
                width = part.dtype.itemsize
                typed[part.dtype] = memory[: memory.numel() // width * width].view(part.dtype)
            base = typed[part.dtype]
            first = base.storage_offset() + part.start // part.dtype.itemsize
            out.append((part.name, base.as_strided(part.shape, _strides(part.shape), first)))
        return out

    def pieces(self, memory: Tensor, own: Mapping[str, Tensor]) -> list[Tensor]:
        """What is transferred, as bytes, one call each."""
        packed = [memory[: self.packed]] if self.packed else []
        alone = [p for p in self.parts if p.alone]
        return packed + [own[p.name].view(torch.uint8) if p.name in own else memory[p.start : p.stop] for p in alone]


class BucketPlan:
    """A publish, bucket by bucket; a function of the manifest and of the bucket's size alone.

    Raises:
        TransportError: names an entry that cannot travel.
    """

    def __init__(self, entries: Iterable[TensorEntry], bucket_bytes: int):
        self.entries = list(entries)
        self.bucket_bytes = bucket_bytes
        grouped: list[list[tuple[TensorEntry, torch.dtype, int]]] = []
        filled = 0
        for entry in self.entries:
            name, shape, kind = entry
            dtype = getattr(torch, kind, None)
            if not isinstance(dtype, torch.dtype) or min(shape, default=1) < 1:
                raise TransportError(
                    f"{name!r} cannot travel: expected a torch dtype and elements, got {kind}{[*shape]}"
                )
            size = math.prod(shape) * dtype.itemsize
            if not grouped or filled + size > bucket_bytes:
                grouped.append([])
                filled = 0
            grouped[-1].append((entry, dtype, size))
            filled = _aligned(filled + size)
        self.buckets = [Bucket(group) for group in grouped]
        """Tensors in order; one that is larger than a bucket gets its own, as large as itself."""

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(part.size for bucket in self.buckets for part in bucket.parts)

    @cached_property
    def digest(self) -> str:
        """By which two members see that they mean the same."""
        text = json.dumps([self.entries, self.bucket_bytes])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[: len(shape)][::-1])
