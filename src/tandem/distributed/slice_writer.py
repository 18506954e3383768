"""A publish of ranks whose weights are cut: each writes the slices of one worker of the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.distributed.slices import EngineSlice, Slice, shard_slice
from tandem.errors import ConfigError

GATHERED_BYTES = 1 << 28
"""Of whole tensors that are gathered by one call, at most, unless a single tensor has more."""


class GatherGroup(NamedTuple):
    """Ranks that send each other what their workers need."""

    ranks: range
    """By their shards' numbers."""
    group: Any
    """None: a rank alone, which sends nothing."""


class Gathered(NamedTuple):
    """A tensor that some rank needs more of than it holds."""

    name: str
    parts: tuple[Slice, ...]
    """Of each rank of the group."""
    size: int
    """Elements that each rank sends: those of the largest part, the first."""


class SliceWriter:
    """Writes a rank's worker's slices again and again; all ranks make and call theirs together.

    What goes where is looked up once. What a rank's shards have in common with its worker's slices is copied by few
    kernels. Where several ranks' shards are one worker's slice, these send them to one another, many tensors at once. A
    tensor of which some rank's slices are in neither is sent by all ranks: key heads that several workers hold, norms
    that all do, a vocabulary whose padded rows are cut elsewhere.

    Args:
        shards: this rank's, by name; their memory must stay where it is.
        shapes: of the whole tensors.
        slices: of every tensor, where its parts lie in the worker's memory.
        dtype: of the worker's memory, to which shards are rounded.
        group: the ranks that hold the whole model together.
        holders: those of them whose shards are together this worker's slice; None: each rank's shard is.

    Raises:
        ConfigError: the engine holds other tensors than the model, or of another dtype.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        shapes: Mapping[str, Sequence[int]],
        slices: Mapping[str, Sequence[EngineSlice]],
        *,
        dtype: torch.dtype,
        group: Any,
        holders: Any = None,
    ):
        _check(shapes, slices, dtype)
        self._shards, self._shapes, self._slices, self._dtype = shards, shapes, slices, dtype
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        gather_groups = [GatherGroup(range(self._rank, self._rank + 1), None), GatherGroup(range(self._ranks), group)]
        if holders is not None:
            num = dist.get_world_size(holders)
            first = self._rank // num * num
            gather_groups.insert(1, GatherGroup(range(first, first + num), holders))
        names = self._by_group(gather_groups)
        pairs = [
            (target.tensor, target.part.within(self._part(name, self._rank)).of(shards[name]))
            for name in names[0]
            for target in slices[name]
            if target.part.num_elements
        ]
        self._targets, self._sources = [target for target, _ in pairs], [source for _, source in pairs]
        self._calls = [
            (gather_group, batch)
            for gather_group, some in zip(gather_groups[1:], names[1:], strict=True)
            for batch in self._batches(gather_group, some)
        ]

    def _part(self, name: str, rank: int) -> Slice:
        return shard_slice(name, self._shapes[name], rank, self._ranks)

    def _by_group(self, gather_groups: Sequence[GatherGroup]) -> list[list[str]]:
        """Names of tensors by the smallest group that has what each of its ranks needs of it.

        Every rank has to know them all, since it has to send.
        """
        device = next(iter(self._shards.values())).device
        least = [self._smallest(name, gather_groups) for name in self._shapes]
        chosen = torch.tensor(least, dtype=torch.int32, device=device)
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX, group=gather_groups[-1].group)
        names: list[list[str]] = [[] for _ in gather_groups]
        for name, number in zip(self._shapes, chosen.tolist(), strict=True):
            names[number].append(name)
        return names

    def _smallest(self, name: str, gather_groups: Sequence[GatherGroup]) -> int:
        """Number of the first group whose ranks' parts, which follow one another, have all that the worker needs."""
        for number, gather_group in enumerate(gather_groups[:-1]):
            held = self._part(name, gather_group.ranks[0]).through(self._part(name, gather_group.ranks[-1]))
            if all(held.contains(target.part) for target in self._slices[name]):
                return number
        return len(gather_groups) - 1

    def _batches(self, gather_group: GatherGroup, names: Sequence[str]) -> Iterator[list[Gathered]]:
        most, batch, size = GATHERED_BYTES // self._dtype.itemsize // len(gather_group.ranks), list[Gathered](), 0
        for name in names:
            parts = tuple(self._part(name, rank) for rank in gather_group.ranks)
            tensor = Gathered(name, parts, parts[0].num_elements)
            if batch and size + tensor.size > most:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.size
        if batch:
            yield batch

    @torch.no_grad()
    def write(self) -> int:
        """Queue it; returns the bytes that this rank receives from others."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        return sum(self._gather(gather_group, batch) for gather_group, batch in self._calls)

    def _gather(self, gather_group: GatherGroup, batch: Sequence[Gathered]) -> int:
        """Send this rank's parts of some tensors, and copy of the group's what the worker needs."""
        sizes, shards = [tensor.size for tensor in batch], [self._shards[tensor.name] for tensor in batch]
        sent_here = torch.empty(sum(sizes), dtype=self._dtype, device=shards[0].device)
        every = torch.empty(len(gather_group.ranks) * sum(sizes), dtype=self._dtype, device=shards[0].device)
        pairs = zip(sent_here.split(sizes), shards, strict=True)
        sent = [(place[: shard.numel()].view(shard.shape), shard) for place, shard in pairs if shard.numel()]
        if sent:
            torch._foreach_copy_([place for place, _ in sent], [shard for _, shard in sent])
        dist.all_gather_into_tensor(every, sent_here, group=gather_group.group)
        needed: list[tuple[Tensor, Tensor]] = []
        for rank, of_rank in enumerate(every.split(sum(sizes))):
            for tensor, place in zip(batch, of_rank.split(sizes), strict=True):
                needed += self._needed(tensor, tensor.parts[rank], place)
        torch._foreach_copy_([target for target, _ in needed], [source for _, source in needed])
        received = sum(part.num_elements for tensor in batch for part in tensor.parts)
        return (received - sum(shard.numel() for _, shard in sent)) * self._dtype.itemsize

    def _needed(self, tensor: Gathered, part: Slice, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Where in the worker's memory elements of one rank's part belong, and these."""
        whole = self._shapes[tensor.name]
        shape = (len(part.rows), len(part.columns) // math.prod(whole[2:]), *whole[2:])[: len(whole)]
        values = place[: part.num_elements].view(shape)
        for target in self._slices[tensor.name]:
            common = target.part.overlap(part)
            if common.num_elements:
                yield common.within(target.part).of(target.tensor), common.within(part).of(values)


def _check(shapes: Mapping[str, Any], slices: Mapping[str, Sequence[EngineSlice]], dtype: torch.dtype) -> None:
    if rest := sorted(slices.keys() ^ shapes.keys()):
        raise ConfigError(f"the engine and the model do not have the same weights: {rest[0]!r} is of one of them")
    for name, targets in slices.items():
        if any(target.tensor.dtype != dtype for target in targets):
            raise ConfigError(
                f"the engine holds {name!r} as {targets[0].tensor.dtype}, the model as {dtype}; give both one dtype"
            )
        if any(target.tensor.shape[2:] != shapes[name][2:] for target in targets):
            what = f"columns of each expert of {name}, of which ranks hold whole ones"
            raise ConfigError(f"the engine's workers divide {what}; set engine.tensor_parallel_size to 1")
