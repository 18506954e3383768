"""Stochastic rounding: bfloat16 weights take updates smaller than their last bit.

A bfloat16 is the upper half of a float32. The lower half is the probability, in 65536ths, of rounding away from zero,
so the weight is right in the mean. The random bits are a function of step, parameter and element alone, so they are the
same on any device, with any number of threads, and after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.model.compilation import fused, number
from tandem.optimizers.base import PIECE


def round_stochastically(value: Tensor, key: int, first: int = 0) -> Tensor:
    """A bfloat16 neighbour of each float32, whose mean over keys is the float32; ``first`` as in ``random_bits``."""
    bits = value.contiguous().view(torch.int32)
    return (random_bits(key, bits, first) + bits).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def write_stochastically(weight: Tensor, value: Tensor, keys: Sequence[int], first: int = 0) -> None:
    """Round float32 values into bfloat16 weights, each piece by a key of its own; on a CUDA device by one kernel.

    The first value is element ``first``, an even number, of the first key's piece.
    """
    if value.device.type == "cuda":
        _fused_write(weight, value, on_device(keys, first, value))
        return
    start = 0
    for key in keys:
        stop = min(start + PIECE - first, len(value))
        weight[start:stop].copy_(round_stochastically(value[start:stop], key, first))
        start, first = stop, 0


class DeviceStream(NamedTuple):
    """A random stream for a run of elements, as compiled functions read it."""

    before_p: Tensor
    """Of each piece's key the half before the hash."""
    within_p: Tensor
    first: float | Tensor
    """Place of the first element in its piece."""


def on_device(keys: Sequence[int], first: int, like: Tensor) -> DeviceStream:
    """The stream of ``write_stochastically``; from pinned memory, so that nothing waits until it is there."""
    words = [[_signed(key >> 32) for key in keys], [_signed(key & 0xFFFFFFFF) for key in keys]]
    host = torch.tensor(words, dtype=torch.int32, pin_memory=like.device.type == "cuda")
    before_p, within_p = host.to(like.device, non_blocking=True)
    return DeviceStream(before_p, within_p, number(first, like))


def write_fused(weight: Tensor, value: Tensor, random: DeviceStream) -> None:
    """What ``write_stochastically`` writes, where operations are fused.

    There to hash for each element costs less than to spread a hash over two.
    """
    at = torch.arange(len(value), dtype=torch.int32, device=value.device) + random.first
    piece, within = at // PIECE, at % PIECE
    hashed = _mixed(within >> 1, random.before_p[piece], random.within_p[piece])
    bits = (hashed >> ((within & 1) << 4)) & 0xFFFF
    weight.copy_(((bits + value.contiguous().view(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16))


_fused_write = fused(write_fused)


def stream(step: int, name: str, start: int) -> int:
    """Key of 64 bits for the piece of a parameter that begins at element ``start``."""
    return int.from_bytes(hashlib.blake2b(f"{step}/{name}/{start}".encode(), digest_size=8).digest(), "big")


def random_bits(key: int, like: Tensor, first: int = 0) -> Tensor:
    """An int32 from 0 to 65535 for each element of a flat tensor, on its device.

    ``first``, an even number, is how many elements of the same key came before it.

    One hash of 32 bits (the lowbias32 mixer, with half of the key before it and half within) serves two elements.
    """
    begin = first // 2
    at = torch.arange(begin, begin + (len(like) + 1) // 2, dtype=torch.int32, device=like.device)
    x = _mixed(at, _signed(key >> 32), _signed(key & 0xFFFFFFFF))
    return x.view(torch.int16)[: len(like)].to(torch.int32).bitwise_and_(0xFFFF)


def _mixed(x: Tensor, before: int | Tensor, within: int | Tensor) -> Tensor:
    """The hash of each number, which it takes the place of."""
    x.add_(before)
    x.bitwise_xor_(_shifted(x, 16)).mul_(0x7FEB352D)
    x.add_(within)
    x.bitwise_xor_(_shifted(x, 15)).mul_(_signed(0x846CA68B))
    x.bitwise_xor_(_shifted(x, 16))
    return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifted right as if unsigned: torch copies the sign bit in."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    """32 bits as torch's int32 has them."""
    return word - (1 << 32) if word >= 1 << 31 else word
