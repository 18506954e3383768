"""Which part of each Hugging Face tensor a rank holds: its shard of the masters, and its slice in the engine.

The engine alone says where its slices lie (``places`` of its parameter map). Here is how the trainer cuts, so that a
rank's shard is the slice of the tensor-parallel worker beside it wherever that can be; ``contains`` says where it is,
and what is not so is gathered. Nothing is trained or published wrongly where the two differ, only more travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.errors import ConfigError
from tandem.lazy import Tensor

ROW_PARALLEL = ("o_proj", "down_proj")
"""Layers whose input is split among tensor-parallel workers, and so the columns of their weight; of all other tensors
the rows are (Megatron-LM, arXiv 1909.08053)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some rows and columns of a tensor; a vector is one column, and of stacked matrices each is a row.

    Example:
        >>> import torch
        >>> half = Slice(rows=range(2, 4), columns=range(0, 3))
        >>> half.of(torch.arange(12).reshape(4, 3)).tolist()
        [[6, 7, 8], [9, 10, 11]]
    """

    rows: range
    """Of the whole tensor."""
    columns: range
    """Of the whole tensor."""

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a whole tensor, as a view; of stacked matrices, whole rows of each."""
        part = tensor[self.rows.start : self.rows.stop]
        width = math.prod(tensor.shape[2:])
        return part if tensor.dim() < 2 else part[:, self.columns.start // width : self.columns.stop // width]

    def contains(self, other: Slice) -> bool:
        """Whether every element of ``other`` is in this part."""
        return not other.num_elements or self.overlap(other) == other

    def overlap(self, other: Slice) -> Slice:
        """The elements that both have."""
        return Slice(rows=_common(self.rows, other.rows), columns=_common(self.columns, other.columns))

    def within(self, outer: Slice) -> Slice:
        """The same elements, counted from where ``outer``, which contains them, begins."""
        return Slice(
            rows=range(self.rows.start - outer.rows.start, self.rows.stop - outer.rows.start),
            columns=range(self.columns.start - outer.columns.start, self.columns.stop - outer.columns.start),
        )

    def through(self, last: Slice) -> Slice:
        """All from the first element of this part to the last one of another, which follows it or is empty."""
        return Slice(
            rows=range(self.rows.start, max(self.rows.stop, last.rows.stop)),
            columns=range(self.columns.start, max(self.columns.stop, last.columns.stop)),
        )

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        return len(self.rows) * len(self.columns)

    @property
    def first(self) -> tuple[int, int]:
        """Row and column of the first element."""
        return self.rows.start, self.columns.start

    @classmethod
    def at(cls, first: tuple[int, int], shape: Sequence[int]) -> Slice:
        """The part of this shape whose first element is in row and column ``first``."""
        columns = range(first[1], first[1] + math.prod(shape[1:]))
        return cls(rows=range(first[0], first[0] + shape[0]), columns=columns)


class EngineSlice(NamedTuple):
    """Memory of an engine's worker, and which part of a Hugging Face tensor it holds."""

    part: Slice
    """Of the whole tensor."""
    tensor: Tensor
    """View into the worker's parameter, of the part's shape."""


def shard_dimension(name: str, shape: Sequence[int], ranks: int) -> int:
    """Dimension along which a tensor is cut among the ranks: 1 for o_proj and down_proj, else 0, such as whole experts.

    Args:
        name: Hugging Face's.
        shape: of the whole tensor.
        ranks: among which it is cut.

    Raises:
        ConfigError: the tensor cannot be cut; its message names it.
    """
    if len(shape) != 2 or name.split(".")[-2:][0] not in ROW_PARALLEL:
        return 0
    if shape[1] % ranks:
        raise ConfigError(
            f"distributed.shard: weights cuts the {shape[1]} columns of {name} among {ranks} ranks, which does not "
            "divide; use a number of ranks that does, more of distributed.replicas, or distributed.shard: states"
        )
    return 1


def shard_slice(name: str, shape: Sequence[int], rank: int, ranks: int) -> Slice:
    """The part that ``rank`` of ``ranks`` holds: even parts, of which the last may be short or empty, as torch cuts.

    Raises:
        ConfigError: as ``shard_dimension``.
    """
    dimension = shard_dimension(name, shape, ranks)
    sizes = (shape[0], math.prod(shape[1:]))
    each = -(-sizes[dimension] // ranks)
    cut = range(min(rank * each, sizes[dimension]), min((rank + 1) * each, sizes[dimension]))
    whole = range(sizes[1 - dimension])
    return Slice(rows=cut, columns=whole) if dimension == 0 else Slice(rows=whole, columns=cut)


def shard_number(rank: int, shards: int, workers: int) -> int:
    """Which shard of all replicas' a rank holds: together those of ranks beside a worker of one number are its slice.

    Args:
        rank: whose neighbours have the other shards of its replica, and the other workers of its engine.
        shards: of each replica, a multiple of ``workers``.
        workers: of each engine.

    Example:
        >>> [shard_number(rank, 4, 2) for rank in range(4)]  # two engines of two workers
        [0, 2, 1, 3]
    """
    engine, worker = divmod(rank % shards, workers)
    return rank - rank % shards + worker * (shards // workers) + engine


def _common(first: range, other: range) -> range:
    start = max(first.start, other.start)
    return range(start, max(start, min(first.stop, other.stop)))
