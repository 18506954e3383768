"""In place of torch's variable-length attention where there is no GPU: by its definition, and as an operation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What torch's function is said to compute, by its definition: masks are aligned to the last query and key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    outs = []
    for q, k, v, probs in _sequences(query, key, value, cu_seq_q, cu_seq_k, scale, window_size):
        assert len(q) <= max_q
        assert len(k) <= max_k
        outs.append(torch.einsum("hqk,khd->qhd", probs, v))
    return torch.cat(outs)


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None,
    window: tuple[int, int],
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Query, key and value of each sequence, a head for each query's, and how much each query takes of each key."""
    group = query.shape[1] // key.shape[1]
    for s in range(len(ends_q) - 1):
        q = query[ends_q[s] : ends_q[s + 1]]
        k, v = (x[ends_k[s] : ends_k[s + 1]].repeat_interleave(group, dim=1) for x in (key, value))
        logits = torch.einsum("qhd,khd->hqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
        at_q, at_k = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None]
        left, right = window
        seen = at_k <= at_q + right if right >= 0 else torch.ones(len(q), len(k), dtype=torch.bool)
        if left >= 0:
            seen &= at_k >= at_q - left
        yield q, k, v, logits.masked_fill(~seen, -math.inf).softmax(-1)


calls: list[str] = []
"""Each run of the operation, "forward" or "backward"."""


@torch.library.custom_op("tandem_tests::varlen", mutates_args=())
def _operation(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, scale: float,
    left: int,
) -> Tensor:  # fmt: skip
    calls.append("forward")
    grouped = query.shape[1] != key.shape[1]
    return naive(
        query, key, value, ends_q, ends_k, most_q, most_k, scale=scale, window_size=(left, 0), enable_gqa=grouped
    )


@_operation.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("tandem_tests::varlen_backward", mutates_args=())
def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int,
    scale: float, left: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls.append("backward")
    gradients: list[list[Tensor]] = [[], [], []]
    sent = grad.split(ends_q.diff().tolist())
    sequences = _sequences(query, key, value, ends_q, ends_k, scale, (left, 0))
    for dout, (q, k, v, probs) in zip(sent, sequences, strict=True):
        dprobs = torch.einsum("qhd,khd->hqk", dout, v)
        dlogits = probs * (dprobs - (probs * dprobs).sum(-1, keepdim=True)) * scale
        gradients[0].append(torch.einsum("hqk,khd->qhd", dlogits, k))
        for into, wide in (
            (1, torch.einsum("hqk,qhd->khd", dlogits, q)),
            (2, torch.einsum("hqk,qhd->khd", probs, dout)),
        ):
            gradients[into].append(wide.unflatten(1, (key.shape[1], -1)).sum(2))
    dquery, dkey, dvalue = map(torch.cat, gradients)
    return dquery, dkey, dvalue


@_gradients.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_gradients(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None, None)


_operation.register_autograd(_backward, setup_context=_keep)


def operation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """The same as an operation that a compiler does not look into, as torch's function is one."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _operation(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size[0])
