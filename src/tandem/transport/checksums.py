"""Additive checksums of tensors: one definition for the trainer, every engine and every shard, on CPU and CUDA.

A tensor is seen as a matrix of its elements' bits, x, taken as unsigned integers. Its checksum is

    sum over r, c of  a[r] * x[r, c] * b[c]   modulo 2^64

with fixed pseudo-random odd weights a and b. The sums of disjoint shards, each at its place in the whole, add up to
the whole's; an element that is changed, moved, swapped or missing changes the sum, unless it is zero where it was and
where it went. Weights of rows times weights of columns, rather than one for each element, cost one multiplication an
element: a matrix is read as fast as memory gives it. It finds accidents; it is no defence against an adversary.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tandem.errors import TornWeights
from tandem.lazy import Tensor, torch

Sums = dict[str, int]
"""Checksum of each tensor, from 0 to 2^64 - 1, by name."""

ROW_SEED = 0x1CE4E5B9BF58476D
COLUMN_SEED = 0x133111EB94D049BB

_MASK = (1 << 64) - 1
_CHUNK = 1 << 19
"""Elements that a CPU widens at a time, a whole row at least: 4 MB of int64, which stays in its cache."""
_DEVICE_CHUNK = 1 << 24
"""The same of what is not in rows on a GPU: 128 MB of int64."""
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32"}
"""What an element's bits are seen as, by its size; 8 bytes are two columns, so that no product loses its top bits."""


class Shard(NamedTuple):
    """A tensor, or the part of it that this rank holds."""

    name: str
    """The whole tensor's name; shards of one name add up."""
    tensor: Tensor
    """A view of the part; it is read where it lies."""
    first: tuple[int, int] = (0, 0)
    """Row and column of its first element in the whole; a vector's elements are its rows."""


class ChecksumTally:
    """Checksums of tensors that stay where they are: prepared once, taken often.

    On CUDA all shards of a device are read by at most a few kernels on its current stream, and one copy brings the
    sums back; what other streams or processes wrote must be complete. A tally made before storage was moved goes on
    reading the old one: make another.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._names: list[str] = []
        self._host: list[tuple[int, Shard]] = []
        devices: dict[torch.device, list[tuple[int, Shard]]] = defaultdict(list)
        for index, shard in enumerate(shards):
            self._names.append(shard.name)
            if shard.tensor.numel() and shard.tensor.device.type == "cpu":
                self._host.append((index, shard))
            elif shard.tensor.numel():
                devices[shard.tensor.device].append((index, shard))
        self._devices = [_DeviceTally(held, len(self._names)) for held in devices.values()]

    def take(self) -> Sums:
        """The checksums of what the tensors hold now."""
        out = dict.fromkeys(self._names, 0)
        for tally in self._devices:
            tally.launch()
        for index, shard in self._host:
            out[self._names[index]] += _sum_host(_matrix(shard.tensor, shard.first))
        for tally in self._devices:
            for index, value in enumerate(tally.sums.tolist()):
                out[self._names[index]] += value
        return {name: value & _MASK for name, value in out.items()}

    def queue(self) -> Tensor:
        """The checksum of each shard, in their order: int64 that have the bits of it.

        They are on one device, and each has a name of its own.

        On CUDA nothing waits for them. The tensor is written anew by the next ``take`` or ``queue``.
        """
        if self._devices:
            (tally,) = self._devices
            tally.launch()
            return tally.sums
        return torch.tensor(list(self.take().values()), dtype=torch.uint64).view(torch.int64)


class ChecksumCache:
    """Checksums of the same tensors over many publishes; the tally is rebuilt only where one was moved or reshaped."""

    def __init__(self) -> None:
        self._tally: ChecksumTally | None = None
        self._where: list[tuple[Any, ...]] = []

    def take(self, shards: Iterable[Shard]) -> Sums:
        """The checksums of what the tensors hold now."""
        shards = list(shards)
        where = [(s.name, s.first, t.data_ptr(), t.dtype, t.shape, t.stride()) for s in shards for t in (s.tensor,)]
        if self._tally is None or where != self._where:
            self._tally, self._where = ChecksumTally(shards), where
        return self._tally.take()


def checksums(named: Iterable[tuple[str, Tensor]]) -> Sums:
    """Checksums of whole tensors by name."""
    return ChecksumTally(Shard(name, tensor) for name, tensor in named).take()


def digest(sums: Mapping[str, int]) -> str:
    """One short name for all the bytes: 16 hex digits over the sorted checksums."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, value in sorted(sums.items()):
        hasher.update(f"{name}={value}\n".encode())
    return hasher.hexdigest()


def joined(whose: str, ranks: Sequence[Mapping[str, str]]) -> Sums:
    """Checksums of whole tensors, from those of the parts (``name@place``) that each rank holds, as hexadecimals.

    Raises:
        TornWeights: two ranks hold the same part with other values; ``whose`` they are is said.
    """
    parts: Sums = {}
    for number, rank in enumerate(ranks):
        for part, value in rank.items():
            if parts.setdefault(part, int(value, 16)) != int(value, 16):
                name = part.rpartition("@")[0]
                raise TornWeights(f"{whose}: rank {number} holds another copy of {name!r} than the ranks before it")
    sums: Sums = {}
    for part, share in parts.items():
        name = part.rpartition("@")[0]
        sums[name] = (sums.get(name, 0) + share) & _MASK
    return sums


@dataclass(frozen=True, slots=True)
class _Matrix:
    words: Tensor
    """[rows, columns] of unsigned integers: a view, wherever strides allow one."""
    row: int
    column: int


def _rows(tensor: Tensor, first: tuple[int, int]) -> tuple[Tensor, int, int]:
    """A tensor with its place in the whole, a vector as one row."""
    row, column = first
    words = 2 if tensor.element_size() == 8 else 1
    bits = tensor.detach()
    return (bits.reshape(1, -1), 0, row * words) if bits.ndim < 2 else (bits, row, column * words)


def _matrix(tensor: Tensor, first: tuple[int, int]) -> _Matrix:
    """See a tensor as its definition does; vectors lie along the columns, where memory is contiguous."""
    bits, row, column = _rows(tensor, first)
    if bits.ndim > 2:
        bits = bits.flatten(1)
    # Columns that are not side by side (a transposed view) are the one case that is copied whole.
    bits = bits if bits.stride(1) == 1 else bits.contiguous()
    return _Matrix(bits.view(getattr(torch, _WORDS[bits.element_size()])), row, column)


def _sum_host(matrix: _Matrix) -> int:
    words = matrix.words
    rows, columns = words.shape
    height = max(1, _CHUNK // columns)
    a = _weights(ROW_SEED, matrix.row + rows, words.device)[matrix.row :]
    across = _weights(COLUMN_SEED, matrix.column + columns, words.device)[matrix.column :][:columns]
    total = 0
    for top in range(0, rows, height):
        chunk = words[top : top + height].to(torch.int64)
        by_row = torch.mv(chunk, across)  # int64 wraps around, which is modulo 2^64
        total += int((by_row * a[top : top + len(by_row)]).sum())
    return total


def _sum_transposed(shard: Shard) -> Tensor:
    """The same of what is read where it lies, by torch's own operations; nothing waits for it."""
    bits, row, column = _rows(*shard[1:])
    bits = bits.contiguous() if bits.element_size() == 8 else bits  # two words each
    words = bits.view(getattr(torch, _WORDS[bits.element_size()]))
    a = _weights(ROW_SEED, row + len(words), words.device)[row : row + len(words)]
    b = _weights(COLUMN_SEED, column + words[0].numel(), words.device)[column : column + words[0].numel()]
    across, height = b.view(words.shape[1:]), max(1, _DEVICE_CHUNK // len(b))
    sums = [
        ((rows.to(torch.int64) * across).flatten(1).sum(1) * down).sum()
        for rows, down in zip(words.split(height), a.split(height), strict=True)
    ]
    return torch.stack(sums).sum()


class _DeviceTally:
    """The shards of one device as a table that a kernel walks, tile by tile."""

    TILE = (64, 512)
    SPAN = 4
    """Rows of a tile that are loaded at once."""

    def __init__(self, shards: Sequence[tuple[int, Shard]], count: int) -> None:
        device = shards[0][1].tensor.device
        matrices: list[tuple[int, _Matrix]] = []
        self._transposed: list[tuple[int, Shard]] = []  # as experts that vLLM stores the other way around
        for index, shard in shards:
            matrix = _matrix(shard.tensor, shard.first)
            if matrix.words.data_ptr() == shard.tensor.data_ptr():
                matrices.append((index, matrix))
            else:  # it is a copy
                self._transposed.append((index, shard))
        self._kept = [matrix.words for _, matrix in matrices]  # the table holds bare addresses
        self.sums = torch.zeros(count, dtype=torch.int64, device=device)
        self._a = _weights(ROW_SEED, max((m.row + m.words.shape[0] for _, m in matrices), default=1), device)
        self._b = _weights(COLUMN_SEED, max((m.column + m.words.shape[1] for _, m in matrices), default=1), device)
        groups: dict[tuple[int, bool], list[tuple[int, _Matrix]]] = defaultdict(list)
        for index, matrix in matrices:
            groups[matrix.words.element_size(), _aligned(matrix.words)].append((index, matrix))
        self._launches = [(size, aligned, *self._table(group)) for (size, aligned), group in groups.items()]

    def _table(self, group: Sequence[tuple[int, _Matrix]]) -> tuple[Tensor, Tensor]:
        """For each matrix what the kernel needs of it; for each tile whose it is."""
        table, tiles = [], []
        for index, m in group:
            rows, columns = m.words.shape
            stride = m.words.stride(0)
            table.append([m.words.data_ptr(), stride, rows, columns, m.row, m.column, 0, index])
            tiles.append(-(-rows // self.TILE[0]) * -(-columns // self.TILE[1]))
        counts = torch.tensor(tiles)
        lines = torch.tensor(table)
        lines[:, 6] = counts.cumsum(0) - counts
        owners = torch.repeat_interleave(torch.arange(len(tiles), dtype=torch.int32), counts)
        return lines.to(self.sums.device), owners.to(self.sums.device)

    def launch(self) -> None:
        """Start the kernels; ``sums`` holds one number a shard when they are done."""
        from tandem.transport.checksum_kernel import sum_tiles, word

        rows, columns = self.TILE
        with torch.cuda.device_of(self.sums):
            self.sums.zero_()
            for size, aligned, table, owners in self._launches:
                sum_tiles[len(owners),](
                    table, owners, self._a, self._b, self.sums,
                    WORD=word(size), ALIGNED=aligned, ROWS=rows, COLUMNS=columns, SPAN=self.SPAN,
                )  # fmt: skip
            for index, shard in self._transposed:
                self.sums[index] += _sum_transposed(shard)


def _aligned(words: Tensor) -> bool:
    """Whether the kernel may be told that rows begin at 16 bytes and end at 16 elements: then it loads 16 at once."""
    return words.data_ptr() % 16 == 0 and words.stride(0) % 16 == 0 and words.shape[1] % 16 == 0


_tables: dict[tuple[int, torch.device], Tensor] = {}


def _weights(seed: int, count: int, device: torch.device) -> Tensor:
    """At least ``count`` weights of rows or of columns; they grow as needed and are shared by all."""
    table = _tables.get((seed, device))
    if table is None or len(table) < count:
        table = _tables[seed, device] = _mixed(seed, 1 << max(16, (count - 1).bit_length())).to(device)
    return table


def _mixed(seed: int, count: int) -> Tensor:
    """Splitmix64 of 0, 1, 2..., made odd: int64 whose bits are the weights."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64))
