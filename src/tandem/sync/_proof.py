"""How trainer and engine prove that they hold the same weights."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Checksums = dict[str, int]
"""CRC-32 of each tensor's bytes, by Hugging Face name."""


def checksums(tensors: Iterable[tuple[str, Tensor]], *, threads: int = 2) -> Checksums:
    """Checksum every tensor. zlib releases the interpreter lock and copies nothing on a CPU."""
    named = list(tensors)
    with ThreadPoolExecutor(threads, "checksum") as pool:
        return dict(zip((name for name, _ in named), pool.map(_checksum, (t for _, t in named)), strict=True))


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1).cpu().view(torch.uint8)
    return zlib.crc32(flat.numpy().data, len(flat))


def digest(sums: Checksums) -> str:
    """One short name for all the bytes: 16 hex digits over the sorted checksums."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, value in sorted(sums.items()):
        hasher.update(f"{name}={value:08x};".encode())
    return hasher.hexdigest()


def gap(engine: Sequence[float], trainer: Sequence[float]) -> float:
    """Largest absolute difference of the probe's logprobs; infinite where one side is not a number."""
    if len(engine) != len(trainer):
        return float("inf")
    worst = 0.0
    for a, b in zip(engine, trainer, strict=True):
        if not abs(a - b) < float("inf"):
            return float("inf")
        worst = max(worst, abs(a - b))
    return worst
