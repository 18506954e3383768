"""The attention of trainer and engine, registered with transformers under the name ``tandem``.

The module is the same whether it trains or samples; what differs is the *plan* passed to its forward:

- ``Packed``: many sequences in one row of tokens. Sequences that begin alike share segments (a tree), so that
  the prompt of a group is computed once for all siblings.
- ``Decode``: one new token for each row of a key/value cache.
- ``ContextPacked``: a rank's run of the tokens of a packed row (context parallel).

Shapes: T tokens of a packed row, R cache rows, H query heads, K key/value heads, D head size, L cached length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from tandem.errors import EngineError
from tandem.model import _varlen
from tandem.model._varlen import Heads
from tandem.model.context import ContextPacked, heads_of_row, tokens_of_rank
from tandem.model.plans import LONG, Decode, KVCache, Packed, Spans, decode_plan, sequential_positions

__all__ = ["NAME", "Decode", "KVCache", "Packed", "Plan", "attend", "decode_plan", "sequential_positions"]

log = logging.getLogger(__name__)

NAME = "tandem"
"""The ``attn_implementation`` a policy is loaded with."""

_SQUARE = 512
"""Sizes of cuDNN's squares are multiples of it."""
_ALIKE = 2e-2
"""Two bfloat16 kernels agree if their results are no further apart, relative to their norm."""

Plan = Packed | Decode | ContextPacked
"""What a forward pass is of."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    plan: Plan | None = None,
    spans: Spans | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query (B, H, T, D), key and value (B, K, T, D) -> (B, T, H, D).

    ``spans`` are those of the plan where the kernel may take it: a compiled layer then has it within its graph.

    Raises:
        EngineError: the model asks for an attention that would be computed wrongly here.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise EngineError(f"its attention uses {name}, which a packed tree does not have")
    if attention_mask is not None:
        raise EngineError("its attention has a mask of its own, which a packed tree does not have")
    if dropout:
        raise EngineError("its attention has dropout: what is scored must be what sampled")
    if not getattr(module, "is_causal", True):
        raise EngineError("its attention looks ahead")
    if spans is not None:
        window = None if sliding_window is not None and spans.most_keys <= sliding_window else sliding_window
        heads = Heads(query, key, value, scaling, window)
        if _varlen.misfit(heads) is None:
            if isinstance(plan, ContextPacked):
                whole = Heads(*heads_of_row(query, key, value, plan.name), scaling, window)
                return tokens_of_rank(_varlen.attend(whole, spans), plan.name), None
            return _varlen.attend(heads, spans), None
    return _between(module, Heads(query, key, value, scaling, sliding_window), plan), None


# A compiled layer calls it between its graphs: every plan is another, and a graph that looked into one would be
# compiled for it alone.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _between(module: nn.Module, heads: Heads, plan: Plan | None) -> Tensor:
    if plan is None:
        raise EngineError("attention was called without a plan: its layers hand none on, or it was not Policy.hidden")
    if isinstance(plan, Decode):
        return _decode(module, heads, plan)
    if isinstance(plan, ContextPacked):
        whole = Heads(*heads_of_row(*heads[:3], plan.name), heads.scaling, heads.window)
        return tokens_of_rank(_packed(module, whole, plan.whole), plan.name)
    return _packed(module, heads, plan)


def _decode(module: nn.Module, heads: Heads, plan: Decode) -> Tensor:
    query, key, value, scaling, window = heads
    layer: int = module.layer_idx  # type: ignore[assignment]
    rows, length = len(plan.rows_R), plan.mask_R11L.shape[-1]
    keys, values = plan.cache.of(layer, key, value)
    keys[plan.rows_R, :, plan.positions_R] = key[:rows, :, 0]
    values[plan.rows_R, :, plan.positions_R] = value[:rows, :, 0]
    # The query heads of one key/value head are laid out as rows of one product: nothing is repeated.
    query_RKGD = query[:rows].reshape(rows, keys.shape[1], -1, query.shape[-1])
    out = F.scaled_dot_product_attention(
        query_RKGD, keys[:rows, :, :length], values[:rows, :, :length], attn_mask=plan.mask(window), scale=scaling
    )
    out = out.reshape(rows, 1, query.shape[1], values.shape[-1])
    return F.pad(out, (0, 0, 0, 0, 0, 0, 0, len(query) - rows))  # rows that have no place in the cache are nobody's


def _packed(module: nn.Module, heads: Heads, plan: Packed) -> Tensor:
    query, key, value, _, window = heads
    if plan.store is not None:
        _store(module, key, value, plan)
    if window is not None and plan.longest <= window:
        heads = heads._replace(window=None)  # nothing is as far away
    if query.device.type == "cuda":
        why = _varlen.unsupported_input(query.dtype, query.device) or _varlen.misfit(heads)
        if why is None:
            shapes = query.shape[1], key.shape[1], query.shape[3]
            if plan.long and heads.window is None and _cudnn_is_faster(*shapes, query.dtype):
                return by_sequence(heads, plan)
            return _varlen.attend(heads, plan.spans(query.device))
        _notice(why)
    return _segments(heads, plan)


def _segments(heads: Heads, plan: Packed) -> Tensor:
    """Segment by segment, on any device and in any precision."""
    query, key, value, scaling, window = heads
    dtype = query.dtype
    if query.device.type == "cpu":
        # The CPU's bf16 attention backward is several times slower than its float32 one, and less exact.
        wide = torch.promote_types(dtype, torch.float32)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    # split, not slices: one gather in the backward pass instead of a zero-filled row per segment.
    queries, keys, values = (x.split(plan.lengths, dim=2) for x in (query, key, value))
    outs = []
    for i, (length, before) in enumerate(zip(plan.lengths, plan.before, strict=True)):
        k, v, mask = keys[i], values[i], None
        if before:
            chain = (*plan.ancestors(i), i)
            k, v = torch.cat([keys[a] for a in chain], dim=2), torch.cat([values[a] for a in chain], dim=2)
        seen = window if window is not None and before + length > window else None
        if before or seen is not None:
            mask = plan.mask(before, length, seen, query)
        causal, q = mask is None, queries[i]
        outs.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True)
        )
    return torch.cat(outs, dim=2).transpose(1, 2).to(dtype)


def by_sequence(heads: Heads, plan: Packed, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> Tensor:
    """One packed row, (1, H, T, D) -> (1, T, H, D), a causal square for each sequence.

    Queries of ancestors are computed again and left out, which costs little where most of a sequence is its last
    segment. Squares are padded at their end, which causal queries do not see: cuDNN builds a plan for every new size.
    """
    queries, keys, values = (x.split(plan.lengths, dim=2) for x in heads[:3])
    outs = []
    with sdpa_kernel(backend):
        for i, (length, before) in enumerate(zip(plan.lengths, plan.before, strict=True)):
            chain, total = (*plan.ancestors(i), i), before + length
            square = (torch.cat([x[a] for a in chain], dim=2) for x in (queries, keys, values))
            q, k, v = (F.pad(x, (0, 0, 0, -total % _SQUARE)) for x in square)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=heads.scaling, enable_gqa=True)
            outs.append(out[:, :, before:total])
    return torch.cat(outs, dim=2).transpose(1, 2)


@cache
def _cudnn_is_faster(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> bool:
    """``_compare_kernels``, once for each shape."""
    device = torch.cuda.current_device()
    # On a thread of its own: here a layer's forward may be recorded, to be computed again.
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
        return thread.submit(_compare_kernels, heads, key_heads, size, dtype).result(timeout=600)


def _compare_kernels(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> bool:
    """True if cuDNN agrees with the flash kernel on one long sequence, forward and backward, in less time."""
    plan = Packed(lengths=(LONG,), parents=(None,))
    draw = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn((1, h, LONG, size), generator=draw, device="cuda", dtype=dtype).requires_grad_()
        for h in (heads, key_heads, key_heads)
    )
    long = Heads(query, key, value, None, None)
    ways: dict[str, Callable[[], Tensor]] = {
        "flash": lambda: _varlen.attend(long, plan.spans(query.device)),
        "cudnn": lambda: by_sequence(long, plan),
    }
    took: dict[str, float] = {}
    results: dict[str, tuple[Tensor, ...]] = {}
    try:
        with torch.enable_grad():
            for name, run in ways.items():
                for _ in range(3):  # the first one builds kernels
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    out = run()
                    results[name] = (out.detach(), *torch.autograd.grad(out, (query, key, value), torch.ones_like(out)))
                    end.record()
                    end.synchronize()
                    took[name] = begin.elapsed_time(end)
    except RuntimeError:  # cuDNN's does not run here
        return False
    apart = max(float((a - b).norm() / a.norm()) for a, b in zip(*results.values(), strict=True))
    return apart < _ALIKE and took["cudnn"] < took["flash"]


def _store(module: nn.Module, key: Tensor, value: Tensor, plan: Packed) -> None:
    """Copy keys and values into the rows of the plan's cache."""
    assert plan.store is not None
    cache, rows = plan.store
    keys, values = cache.of(module.layer_idx, key, value)  # type: ignore[arg-type]
    start = 0
    for segment_rows, length in zip(rows, plan.lengths, strict=True):
        for row in segment_rows:
            keys[row, :, :length] = key[0, :, start : start + length]
            values[row, :, :length] = value[0, :, start : start + length]
        start += length


@cache
def _notice(why: str) -> None:
    """Say once that a GPU computes attention the slow way."""
    log.warning("attention of packed sequences runs segment by segment, several times slower, since %s", why)


AttentionInterface.register(NAME, attend)
