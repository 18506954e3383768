"""Sampling from logits: temperature and support. The engine draws with it; the trainer recomputes it.

Everything here works row by row in float32 (sums over the vocabulary in float64), so a row's result does
not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 64
"""Width of the blocks of the inverse CDF: sums over blocks first, then a search within one."""
_NUCLEUS = (256, 4096)
"""How many of the likeliest tokens are sorted, in turn; the whole vocabulary only where these miss top_p."""


def uniform(keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One float64 in [0, 1) per (key, position), the same on every machine and in every batch.

    A counter-based generator (two rounds of splitmix64): no state, so the n-th token of a request is drawn
    alike however the request was batched or resumed. Keys and positions are taken modulo 2**64.
    """
    mask = (1 << 64) - 1
    counter_N = np.array([k & mask for k in keys], dtype=np.uint64)
    step_N = np.array([p & mask for p in positions], dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits_N = _splitmix(_splitmix(counter_N) + step_N)
    return torch.from_numpy((bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _splitmix(x_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood's splitmix64: a bijection of 64 bits that passes BigCrush."""
    x_N = x_N + np.uint64(0x9E3779B97F4A7C15)
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


PerRow = float | Sequence[float]
"""An option: one for all rows, or one for each."""


def threshold(logits_NV: Tensor, top_p: PerRow = 1.0, top_k: PerRow = 0, min_p: PerRow = 0.0) -> Tensor | None:
    """The smallest logit of each row's support: ``logits >= threshold`` is the support. None if all are everything.

    ``logits_NV`` are already divided by the temperature. 1.0, 0 and 0.0 keep every token (threshold -inf). Applied
    in vLLM's order: min_p, top_k, then top_p of what is left, renormalised. The support is a set of values: tokens
    that tie at its edge are all in it.
    """
    min_p_N, top_k_N, top_p_N = (_per_row(value, logits_NV) for value in (min_p, top_k, top_p))
    limits_p, limits_k, limits_min = np.any(np.less(top_p, 1.0)), np.any(top_k), np.any(min_p)
    if not (limits_p or limits_k or limits_min):
        return None
    edge_N = torch.full_like(logits_NV[:, 0], -math.inf)
    if limits_min:
        edge_N = logits_NV.amax(-1) + min_p_N.log()
    if limits_k:
        count_N = top_k_N.long().clamp(1, logits_NV.shape[1])
        top_NK = logits_NV.topk(int(count_N.max()), dim=-1).values
        kth_N = top_NK.gather(1, count_N[:, None] - 1)[:, 0]
        edge_N = torch.where(top_k_N > 0, torch.maximum(edge_N, kth_N), edge_N)
    if limits_p:
        left_NV = logits_NV.masked_fill(logits_NV < edge_N[:, None], -math.inf)
        edge_N = torch.maximum(edge_N, _nucleus(left_NV, top_p_N))
    return edge_N


def _per_row(value: PerRow, logits_NV: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=logits_NV.dtype, device=logits_NV.device).expand(logits_NV.shape[0])


def _nucleus(logits_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Smallest logit of the fewest tokens whose probability reaches top_p; the likeliest is always kept."""
    vocab = logits_NV.shape[1]
    lse_N1 = logits_NV.logsumexp(-1, keepdim=True)
    edge_N = torch.full_like(top_p_N, -math.inf)
    open_M = (top_p_N < 1).nonzero()[:, 0]  # rows whose edge is not known yet
    for width in (*(w for w in _NUCLEUS if w < vocab), vocab):
        top_MK = logits_NV[open_M].topk(width, dim=-1).values
        mass_MK = (top_MK - lse_N1[open_M]).exp().double().cumsum(-1)
        count_M = (mass_MK < top_p_N[open_M, None]).sum(-1)
        edge_N[open_M] = top_MK.gather(1, count_M.clamp(max=width - 1)[:, None])[:, 0]
        open_M = open_M[count_M == width]
        if not open_M.numel():
            break
    return edge_N


def restrict(logits_NV: Tensor, top_p: PerRow = 1.0, top_k: PerRow = 0, min_p: PerRow = 0.0) -> Tensor:
    """The logits with -inf outside the support of top_p, top_k and min_p; see ``threshold``. Not in place."""
    edge_N = threshold(logits_NV, top_p, top_k, min_p)
    return logits_NV if edge_N is None else logits_NV.masked_fill(logits_NV < edge_N[:, None], -math.inf)


def draw(logits_NV: Tensor, uniform_N: Tensor, *, greedy: Sequence[bool] = ()) -> tuple[Tensor, Tensor]:
    """Draw one token per row; returns token ids (int64) and their logprobs (float32) under ``logits_NV``.

    Args:
        logits_NV: float32, divided by the temperature, -inf outside the support.
        uniform_N: float64 in [0, 1): where in the cumulative distribution each row's token lies.
        greedy: true for each row that takes the likeliest token instead (the first of those that tie); such a row
            should not have been divided. Empty: none does.

    A token of probability zero is never drawn. A row that holds NaN or +inf gives a logprob that is NaN: the
    caller must check.
    """
    probs_NV = torch.softmax(logits_NV, dim=-1)
    tokens_N = _inverse_cdf(probs_NV, uniform_N)
    if any(greedy):
        tokens_N = torch.where(torch.tensor(greedy, device=tokens_N.device), logits_NV.argmax(-1), tokens_N)
    return tokens_N, probs_NV.gather(1, tokens_N[:, None])[:, 0].log()


def _inverse_cdf(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """First index whose cumulative probability exceeds ``uniform * total``, found in two levels."""
    vocab = probs_NV.shape[1]
    whole = vocab - vocab % _BLOCK
    sums_NB = torch.unflatten(probs_NV[:, :whole], 1, (-1, _BLOCK)).sum(-1)
    if whole < vocab:
        sums_NB = torch.cat([sums_NB, probs_NV[:, whole:].sum(-1, keepdim=True)], dim=1)
    block_N1, rest_N1 = _locate(sums_NB, uniform_N[:, None])
    index_NW = block_N1 * _BLOCK + torch.arange(_BLOCK, device=probs_NV.device)
    inside_NW = probs_NV.gather(1, index_NW.clamp(max=vocab - 1)).masked_fill(index_NW >= vocab, 0.0)
    within_N1, _ = _locate(inside_NW, rest_N1)
    return (block_N1 * _BLOCK + within_N1)[:, 0].clamp(max=vocab - 1)


def _locate(weights_NB: Tensor, uniform_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Index that ``uniform`` falls on, never one of weight zero, and where within it, again in [0, 1].

    The second bound holds the index to the last positive weight when rounding carries the target to the end.
    """
    cumulative_NB = weights_NB.double().cumsum(-1)
    total_N1 = cumulative_NB[:, -1:]
    target_N1 = uniform_N1 * total_N1
    past_N1 = (cumulative_NB <= target_N1).sum(-1, keepdim=True)
    last_N1 = (cumulative_NB < total_N1).sum(-1, keepdim=True)
    index_N1 = torch.minimum(past_N1, last_N1)
    weight_N1 = weights_NB.gather(1, index_N1).double()
    before_N1 = cumulative_NB.gather(1, index_N1) - weight_N1
    return index_N1, ((target_N1 - before_N1) / weight_N1).clamp(0.0, 1.0)
