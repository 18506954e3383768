"""Attention plans: packed prefix trees, decoding with a KV cache, and their masks.

Shapes: T tokens of a packed row, S segments of it, R cache rows, K key/value heads, D head size, L cached length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 64
"""A cache holds, and is attended to in, whole blocks of so many tokens."""
LONG = 4096
"""Tokens from which a sequence is long: cuDNN's attention is then faster than the variable-length flash kernel."""


class KVCache:
    """Keys and values of R rows, grown as rows get longer. One tensor per layer, (R, K, L, D).

    A layer's shape is that of the first key and value that it is given: layers differ, and so do keys and values.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.capacity = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values; ``key`` and ``value`` are some that go there."""
        for store, like in ((self.keys, key), (self.values, value)):
            if layer not in store:  # zeros, because a masked NaN is still a NaN
                store[layer] = like.new_zeros((self.rows, like.shape[1], self.capacity, like.shape[3]))
        return self.keys[layer], self.values[layer]

    def reserve(self, length: int) -> None:
        """Make room for rows of ``length`` tokens; what is cached stays."""
        if length <= self.capacity:
            return
        # Growing by a half keeps the number of copies logarithmic.
        capacity = -(-max(length, self.capacity * 3 // 2) // BLOCK) * BLOCK
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
                store[layer][:, :, : self.capacity] = old
        self.capacity = capacity

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another."""
        for store in (self.keys, self.values):
            for layer in store.values():
                layer[target, :, :length] = layer[source, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self.keys, self.values = {}, {}
        self.capacity = 0


class Spans(NamedTuple):
    """A packed row as one kernel takes it: S sequences, each with queries of its own and keys that may be repeated.

    A named tuple is what torch's compiler looks into without making code for each one anew.
    """

    query_ends: Tensor
    """int32 (S + 1); where each sequence's queries end, from 0."""
    key_ends: Tensor
    """int32 (S + 1); the same of its keys."""
    keys: Tensor | None
    """int64; the packed place of each key, ancestors before what continues them. None: the row as it is."""
    most_queries: int
    """No sequence has more queries."""
    most_keys: int
    """No sequence has more keys."""


# Not frozen: torch's compiler looks into frozen dataclasses (2.11 does), and would compile for every plan anew.
@dataclass(slots=True, kw_only=True)
class Packed:
    """Segments that follow one another in a packed row. Each attends to its ancestors and, causally, to itself.

    Raises:
        ValueError: a segment continues one that does not come before it.
    """

    lengths: tuple[int, ...]
    """Tokens of each segment; they sum to T."""
    parents: tuple[int | None, ...]
    """Index of the earlier segment each one continues; None for one that starts a sequence."""
    store: tuple[KVCache, tuple[tuple[int, ...], ...]] | None = None
    """Where keys and values go: a cache, and per segment the rows that get a copy, from position 0. Each of its
    segments starts a sequence."""
    experts_TLK: Tensor | None = None
    """int16; the experts of each token in each layer, negative where the router chooses; None: it does everywhere."""
    before: tuple[int, ...] = field(init=False)
    """Tokens of each segment's ancestors: the position of its own first one."""
    long: bool = field(init=False)
    """True if most of the row's attention is that of long sequences, each mostly its last segment."""
    _masks: dict[tuple[Any, ...], Tensor] = field(init=False, repr=False, default_factory=dict)
    _spans: dict[torch.device, Spans] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        before: list[int] = []
        for i, parent in enumerate(self.parents):
            if parent is not None and not 0 <= parent < i:
                raise ValueError(f"segment {i} must continue an earlier one, not {parent}")
            before.append(0 if parent is None else before[parent] + self.lengths[parent])
        self.before = tuple(before)
        squares = sum((start + length) ** 2 for start, length in zip(before, self.lengths, strict=True))
        cubes = sum((start + length) ** 3 for start, length in zip(before, self.lengths, strict=True))
        # Every layer asks; what is computed again of ancestors must be a fifth at most.
        self.long = cubes >= LONG * squares > 0 and squares < 1.25 * (squares - sum(start**2 for start in before))

    @property
    def longest(self) -> int:
        """Most tokens that any token sees, itself included."""
        return max(map(sum, zip(self.before, self.lengths, strict=True)), default=0)

    def ancestors(self, segment: int) -> list[int]:
        """Segments that it continues, the first of the sequence first."""
        chain: list[int] = []
        parent = self.parents[segment]
        while parent is not None:
            chain.append(parent)
            parent = self.parents[parent]
        return chain[::-1]

    def mask(self, before: int, length: int, window: int | None, like: Tensor) -> Tensor:
        """Additive mask (length, before + length): everything before and itself causally, or the last ``window`` of it.

        Built once per plan, device and type.
        """
        key = (before, length, window, like.device, like.dtype)
        if key not in self._masks:
            causal = torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)
            mask = F.pad(causal, (before, 0))
            if window is not None:
                far = torch.ones_like(mask, dtype=torch.bool).tril_(before - window)
                mask.masked_fill_(far, float("-inf"))
            self._masks[key] = mask
        return self._masks[key]

    def spans(self, device: torch.device) -> Spans:
        """The row for one kernel. Built once per plan and device, without waiting for the device."""
        if device not in self._spans:
            self._spans[device] = self._build(device)
        return self._spans[device]

    def _build(self, device: torch.device) -> Spans:
        lengths = np.asarray(self.lengths, dtype=np.int64)
        ends = np.concatenate(([0], lengths.cumsum()))
        key_lengths = lengths + np.asarray(self.before, dtype=np.int64)
        shared = any(parent is not None for parent in self.parents)
        keys: list[NDArray[np.int64]] = []
        places = [np.arange(ends[i], ends[i + 1]) for i in range(len(lengths))] if shared else []
        for i in range(len(places)):
            keys += [places[a] for a in (*self.ancestors(i), i)]
        return Spans(
            query_ends=moved(ends.astype(np.int32), device),
            key_ends=moved(np.concatenate(([0], key_lengths.cumsum())).astype(np.int32), device),
            keys=moved(np.concatenate(keys), device) if shared else None,
            # A bound is all that is asked for, and kernels treat a bound of 1 as decoding, which has no backward.
            most_queries=max(2, int(lengths.max(initial=0))),
            most_keys=max(2, self.longest),
        )


@dataclass(slots=True, kw_only=True)  # as Packed
class Decode:
    """One token for each of the first R rows of a cache."""

    cache: KVCache
    """Holds what came before; the new keys and values are written to it."""
    positions_R: Tensor
    """int64; where each row's new token goes."""
    rows_R: Tensor
    """int64; 0 .. R-1."""
    mask_R11L: Tensor
    """Additive; -inf past each row's own length."""
    _windows: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """Additive mask (R, 1, 1, L) of layers that see the last ``window`` tokens, or all. Built once per plan."""
        length = self.mask_R11L.shape[-1]
        if window is None or length <= window:
            return self.mask_R11L
        if window not in self._windows:
            far_RL = torch.arange(length, device=self.positions_R.device) <= self.positions_R[:, None] - window
            self._windows[window] = self.mask_R11L.masked_fill(far_RL[:, None, None], float("-inf"))
        return self._windows[window]


def sequential_positions(plan: Packed) -> NDArray[np.int64]:
    """Position of each packed token within its own sequence, (T)."""
    lengths = np.asarray(plan.lengths, dtype=np.int64)
    starts = lengths.cumsum() - lengths
    return np.arange(lengths.sum()) + np.repeat(np.asarray(plan.before, dtype=np.int64) - starts, lengths)


def decode_plan(cache: KVCache, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Decode:
    """Plan for rows that hold ``lengths`` tokens each and get one more."""
    cache.reserve(max(lengths) + 1)
    positions_R = torch.tensor(lengths, device=device)
    # Whole blocks of columns: sums over keys are then in one order, however long the longest row is.
    columns_L = torch.arange(-(-(max(lengths) + 1) // BLOCK) * BLOCK, device=device)
    mask = torch.zeros(len(lengths), 1, 1, len(columns_L), dtype=dtype, device=device)
    mask.masked_fill_((columns_L[None, :] > positions_R[:, None])[:, None, None, :], float("-inf"))
    rows_R = torch.arange(len(lengths), device=device)
    return Decode(cache=cache, positions_R=positions_R, rows_R=rows_R, mask_R11L=mask)


def moved(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of it on the device; a GPU fetches it from pinned memory while the host goes on."""
    host = torch.from_numpy(array)
    if device.type == "cuda" and type(host) is Tensor:  # one that stands for another, to plan memory, is nowhere
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
