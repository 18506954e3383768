"""One attention for both sides of the loop, registered with transformers under the name ``tandem``.

The module is the same whether it trains or samples; what differs is the *plan* passed to its forward:

- ``Packed``: many sequences in one row of tokens. Sequences that begin alike share a segment (a tree), so that
  the prompt of a group is computed once for all siblings.
- ``Decode``: one new token for each row of a key/value cache.

Shapes: T tokens of a packed row, R cache rows, H query heads, K key/value heads, D head size, L cached length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.errors import EngineError

NAME = "tandem"
"""The ``attn_implementation`` a policy is loaded with."""


class KVCache:
    """Keys and values of R rows, grown as rows get longer. One tensor per layer, (R, K, L, D)."""

    def __init__(self, *, layers: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.rows = rows
        self.capacity = 0
        self._shape = (heads, head_dim)
        self._dtype = dtype
        self._device = device
        self.keys: list[Tensor] = [torch.empty(0)] * layers
        self.values: list[Tensor] = [torch.empty(0)] * layers

    def reserve(self, length: int) -> None:
        """Make room for rows of ``length`` tokens; what is cached stays."""
        if length <= self.capacity:
            return
        # Growing by a half keeps the number of copies logarithmic.
        capacity = -(-max(length, self.capacity * 3 // 2) // 64) * 64
        heads, dim = self._shape
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                # Zeros, because a masked NaN is still a NaN.
                store[layer] = torch.zeros((self.rows, heads, capacity, dim), dtype=self._dtype, device=self._device)
                if self.capacity:
                    store[layer][:, :, : self.capacity] = old
        self.capacity = capacity

    @property
    def bytes(self) -> int:
        """Memory it holds, touched or not."""
        return sum(layer.nbytes for store in (self.keys, self.values) for layer in store)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another."""
        for store in (self.keys, self.values):
            for layer in store:
                layer[target, :, :length] = layer[source, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self.keys = [torch.empty(0)] * len(self.keys)
        self.values = [torch.empty(0)] * len(self.values)
        self.capacity = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Segments that follow one another in a packed row. A segment attends to its parent and, causally, to itself."""

    lengths: tuple[int, ...]
    """Tokens of each segment; they sum to T."""
    parents: tuple[int | None, ...]
    """Index of the earlier segment each one continues; None for one that starts a sequence."""
    store: tuple[KVCache, tuple[tuple[int, ...], ...]] | None = None
    """Where keys and values go: a cache, and per segment the rows that get a copy, from position 0."""
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for i, parent in enumerate(self.parents):
            if parent is not None and (parent >= i or self.parents[parent] is not None):
                raise ValueError(f"segment {i} must continue an earlier one that starts a sequence, not {parent}")

    def mask(self, before: int, length: int, like: Tensor) -> Tensor:
        """Additive mask (length, before + length): everything before, itself causally. Built once per plan."""
        key = (before, length)
        if key not in self._masks:
            own = torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)
            self._masks[key] = F.pad(own, (before, 0))
        return self._masks[key]


@dataclass(frozen=True, slots=True, kw_only=True)
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


Plan = Packed | Decode


def sequential_positions(plan: Packed) -> list[int]:
    """Position of each packed token within its own sequence."""
    starts: list[int] = []
    positions: list[int] = []
    for length, parent in zip(plan.lengths, plan.parents, strict=True):
        start = 0 if parent is None else starts[parent] + plan.lengths[parent]
        starts.append(start)
        positions.extend(range(start, start + length))
    return positions


def decode_plan(cache: KVCache, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Decode:
    """Plan for rows that hold ``lengths`` tokens each and get one more."""
    cache.reserve(max(lengths) + 1)
    positions_R = torch.tensor(lengths, device=device)
    columns_L = torch.arange(max(lengths) + 1, device=device)
    mask = torch.zeros(len(lengths), 1, 1, len(columns_L), dtype=dtype, device=device)
    mask.masked_fill_((columns_L[None, :] > positions_R[:, None])[:, None, None, :], float("-inf"))
    return Decode(
        cache=cache, positions_R=positions_R, rows_R=torch.arange(len(lengths), device=device), mask_R11L=mask
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: Plan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query (B, H, T, D), key and value (B, K, T, D) -> (B, T, H, D).

    Raises:
        EngineError: the model asks for an attention that would be computed wrongly here.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise EngineError(
                f"this model's attention uses {name}, which Tandem does not compute; choose another model"
            )
    if plan is None:
        raise EngineError(
            "a Tandem policy was called without a plan; call Policy.hidden, or save the model and reload it"
        )
    if isinstance(plan, Decode):
        return _decode(module, query, key, value, scaling, plan), None
    return _packed(module, query, key, value, scaling, dropout, plan), None


def _decode(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, plan: Decode
) -> Tensor:
    layer: int = module.layer_idx  # type: ignore[assignment]
    rows, length = len(plan.rows_R), plan.mask_R11L.shape[-1]
    keys, values = plan.cache.keys[layer], plan.cache.values[layer]
    keys[plan.rows_R, :, plan.positions_R] = key[:, :, 0]
    values[plan.rows_R, :, plan.positions_R] = value[:, :, 0]
    # The query heads of one key/value head are laid out as rows of one product: nothing is repeated.
    query_RKGD = query.reshape(rows, keys.shape[1], -1, query.shape[-1])
    out = F.scaled_dot_product_attention(
        query_RKGD, keys[:rows, :, :length], values[:rows, :, :length], attn_mask=plan.mask_R11L, scale=scaling
    )
    return out.reshape(rows, 1, query.shape[1], query.shape[-1])


def _packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    plan: Packed,
) -> Tensor:
    if plan.store is not None:
        _store(module, key, value, *plan.store, plan.lengths)
    dtype = query.dtype
    if query.device.type == "cpu":
        # The CPU's bf16 attention backward is several times slower than its float32 one, and less exact.
        query, key, value = query.float(), key.float(), value.float()
    # split, not slices: one gather in the backward pass instead of a zero-filled row per segment.
    queries, keys, values = (x.split(plan.lengths, dim=2) for x in (query, key, value))
    outs = []
    for i, parent in enumerate(plan.parents):
        k, v, mask = keys[i], values[i], None
        if parent is not None:
            k, v = torch.cat((keys[parent], k), dim=2), torch.cat((values[parent], v), dim=2)
            mask = plan.mask(plan.lengths[parent], plan.lengths[i], query)
        out = F.scaled_dot_product_attention(
            queries[i],
            k,
            v,
            attn_mask=mask,
            is_causal=parent is None,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=True,
        )
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2).to(dtype)


def _store(
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    cache: KVCache,
    rows: tuple[tuple[int, ...], ...],
    lengths: Sequence[int],
) -> None:
    layer: int = module.layer_idx  # type: ignore[assignment]
    start = 0
    for segment_rows, length in zip(rows, lengths, strict=True):
        for row in segment_rows:
            cache.keys[layer][row, :, :length] = key[0, :, start : start + length]
            cache.values[layer][row, :, :length] = value[0, :, start : start + length]
        start += length


AttentionInterface.register(NAME, attend)
