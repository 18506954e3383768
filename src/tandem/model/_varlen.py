"""Variable-length flash attention of torch: a whole packed row in one kernel.

Every segment is one sequence of the kernel: its queries are its own tokens, its keys those of its ancestors and then
its own. The kernel's causal mask is aligned to the last query and the last key, so that a segment sees all of its
ancestors and, causally, itself. Keys and values of an ancestor are repeated for every descendant (they are narrow,
since several query heads share one); what they were computed from is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from tandem.model.plans import Spans

WIDEST = 256
"""Largest head that flash attention has kernels for."""


_KERNEL: Callable[..., Any] = varlen_attn
_GROUPS_ON_REQUEST = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""The kernel groups heads if it is told to; before torch 2.12 unasked."""


class Heads(NamedTuple):
    """What attention is computed of, as transformers gives it; shapes (B, heads, T, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    """Of products of queries and keys; None: by the root of the head's size."""
    window: int | None
    """Tokens that each one sees, itself included; None: all before it."""


def unsupported_input(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel takes nothing of this type on this device, in words that follow "since"; None if it does."""
    if device.type != "cuda":
        return "its kernel runs on a GPU"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch has no variable-length flash attention"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"its kernel needs compute capability 8.0, and {torch.cuda.get_device_name(device)} is older"
    return None


def misfit(heads: Heads) -> str | None:
    """Why it cannot take these shapes and options; a compiled layer asks for this alone."""
    query, key, value, _, _ = heads
    size = query.shape[-1]
    if size > WIDEST or size % 8 or not size == key.shape[-1] == value.shape[-1]:
        return f"its kernel takes heads of up to {WIDEST} in steps of 8, not {size} with values of {value.shape[-1]}"
    return None


def attend(heads: Heads, at: Spans) -> Tensor:
    """One packed row. query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D)."""
    query, key, value, scaling, window = heads
    queries_THD, keys_TKD, values_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if at.keys is not None:
        keys_TKD, values_TKD = repeated(keys_TKD, at.keys), repeated(values_TKD, at.keys)
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if _GROUPS_ON_REQUEST else {}
    out: Tensor = _KERNEL(
        queries_THD,
        keys_TKD,
        values_TKD,
        at.query_ends,
        at.key_ends,
        at.most_queries,
        at.most_keys,
        scale=scaling,
        # Keys to the left of the query's own: all, or as many as fill a window that counts the query's too.
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return out[None]


def repeated(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by their index, (n, ...); what several copies of a row send back is added up in float32 at least."""
    repeated: Tensor = _Repeated.apply(rows, index)  # type: ignore[no-untyped-call]
    return repeated


class _Repeated(torch.autograd.Function):
    """index_select, whose own backward would add the gradients of copies in bfloat16."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (index,) = grads, ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros((ctx.count, *grad.shape[1:]), dtype=wide, device=grad.device)
        return total.index_add_(0, index, grad.to(wide)).to(grad.dtype), None
