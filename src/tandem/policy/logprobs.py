"""Logprobs of given tokens from the last hidden states, without ever holding a full matrix of logits.

The vocabulary is walked in tiles: a tile is [tokens, some of the vocabulary], a few million numbers however
long the micro-batch and large the vocabulary, so that it stays in cache and peak memory does not grow with
tokens x vocabulary. The backward pass recomputes the tiles. Each row of the weight's gradient is complete
after its own tile, so no float32 copy of it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.policy.sampling import threshold

_TILE_CPU = 3 << 20
"""Logits held at once on a CPU: 12 MB of float32, about a last-level cache's share."""
_TILE_GPU = 64 << 20
"""Logits held at once on an accelerator: 256 MB of float32, enough to fill it."""
_OUTSIDE = -1e30
"""Logit of a token outside the support: its probability is 0, and 0 times it is 0 (with -inf it is NaN)."""


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    entropy: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Logprob of each target under the distribution it was sampled from; float32, differentiable.

    Args:
        hidden_NH: last hidden states, in the weight's dtype; gets a gradient if it needs one.
        weight_VH: the output embedding; gets a gradient if it needs one (not when frozen).
        targets_N: int64 token ids.
        temperature: above 0, one for all or float32 per token; logits are divided by it.
        bias: of the output embedding.
        top_p: with top_k and min_p the support the tokens were sampled from; a target is always counted in, since
            the logits here may differ in the last bit from those it was drawn from.
        top_k: see top_p.
        min_p: see top_p.
        entropy: also return the entropy of each distribution in nats (float32, no gradient); costs a pass.
        tile: most logits held at once; by default as fits the device.

    Returns:
        The logprobs, and the entropies or None. Sums are float32 (float64 for a float64 weight).
    """
    wide = torch.promote_types(weight_VH.dtype, torch.float32)
    temperature_N1 = torch.as_tensor(temperature, dtype=wide, device=hidden_NH.device)
    temperature_N1 = temperature_N1.reshape(-1, 1).expand(targets_N.numel(), 1)
    tiles = _Tiles(hidden_NH, weight_VH, bias, targets_N, temperature_N1, tile)
    if top_p < 1.0 or top_k > 0 or min_p > 0.0:
        tiles.edge_N1 = tiles.support_edge(top_p, top_k, min_p)
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, tiles, entropy
    )
    return logprobs_N, entropy_N if entropy else None


class _Tiles:
    """Walks the logits tile by tile, always with the same arithmetic, so that backward sees forward's numbers."""

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N1: Tensor,
        tile: int | None,
    ) -> None:
        self.hidden_NH, self.weight_VH = hidden_NH.detach(), weight_VH.detach()
        self.bias_V = None if bias_V is None else bias_V.detach()
        self.targets_N1, self.temperature_N1 = targets_N[:, None], temperature_N1
        self.edge_N1: Tensor | None = None
        self.tile = tile or (_TILE_CPU if hidden_NH.device.type == "cpu" else _TILE_GPU)

    def walk(self) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
        """Yield (start, end, logits, column of each target, true where the target is in it).

        The logits are the caller's to overwrite; the next tile takes their place.
        """
        rows, vocab = self.targets_N1.shape[0], self.weight_VH.shape[0]
        width = min(vocab, max(64, self.tile // max(1, rows) // 64 * 64))
        narrow = self.hidden_NH.new_empty(rows * width)
        wide = self.temperature_N1.new_empty(rows * width)
        for start in range(0, vocab, width):
            end = min(vocab, start + width)
            place_N1 = self.targets_N1 - start
            here_N1 = (place_N1 >= 0) & (place_N1 < end - start)
            place_N1 = place_N1.clamp(0, end - start - 1)
            logits_NW = wide[: rows * (end - start)].view(rows, end - start)
            if wide.dtype == narrow.dtype:
                torch.mm(self.hidden_NH, self.weight_VH[start:end].t(), out=logits_NW)
            else:
                narrow_NW = narrow[: logits_NW.numel()].view_as(logits_NW)
                logits_NW.copy_(torch.mm(self.hidden_NH, self.weight_VH[start:end].t(), out=narrow_NW))
            self._finish(logits_NW, start, end, place_N1, here_N1)
            yield start, end, logits_NW, place_N1, here_N1

    def _finish(self, logits_NW: Tensor, start: int, end: int, place_N1: Tensor, here_N1: Tensor) -> None:
        """Bias, temperature and support, in place."""
        if self.bias_V is not None:
            logits_NW.add_(self.bias_V[start:end])
        logits_NW.div_(self.temperature_N1)
        if self.edge_N1 is not None:
            target_N1 = logits_NW.gather(1, place_N1)
            logits_NW.masked_fill_(logits_NW < self.edge_N1, _OUTSIDE)
            kept_N1 = torch.where(here_N1, target_N1, logits_NW.gather(1, place_N1))
            logits_NW.scatter_(1, place_N1, kept_N1)

    def support_edge(self, top_p: float, top_k: int, min_p: float) -> Tensor:
        """Smallest logit of each row's support. It needs whole rows, so it takes a few rows at a time."""
        rows = max(1, self.tile // self.weight_VH.shape[0])
        edges = [self.temperature_N1.new_empty(0)]
        for hidden_CH, temperature_C1 in zip(
            torch.split(self.hidden_NH, rows), torch.split(self.temperature_N1, rows), strict=True
        ):
            logits_CV = (hidden_CH @ self.weight_VH.t()).to(temperature_C1.dtype)
            if self.bias_V is not None:
                logits_CV.add_(self.bias_V)
            edge_C = threshold(logits_CV.div_(temperature_C1), top_p, top_k, min_p)
            edges += [] if edge_C is None else [edge_C]
        edge_N1 = torch.cat(edges)[:, None]
        if self.weight_VH.dtype == edge_N1.dtype:
            # Products of another shape may differ in the last bits, and would drop the token that is the edge. Logits
            # of narrower weights are rounded so coarsely that they are the same again, and others are near.
            edge_N1 -= (edge_N1.abs() + 1) * (16 * torch.finfo(edge_N1.dtype).eps)
        return edge_N1


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, tiles: _Tiles, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """An online logsumexp: ``total`` is the sum of exp(logit - top) over the tiles so far."""
        top_N1 = torch.full_like(tiles.temperature_N1, -math.inf, memory_format=torch.contiguous_format)
        total_N1, target_N1 = torch.zeros_like(top_N1), torch.zeros_like(top_N1)
        weighted_N1 = torch.zeros_like(top_N1)
        for _, _, logits_NW, place_N1, here_N1 in tiles.walk():
            target_N1 = torch.where(here_N1, logits_NW.gather(1, place_N1), target_N1)
            raised_N1 = torch.maximum(top_N1, logits_NW.amax(-1, keepdim=True))
            shrink_N1 = (top_N1 - raised_N1).exp_()
            logits_NW.sub_(raised_N1)
            if entropy:
                probs_NW = logits_NW.exp()
                moved_N1 = torch.where(total_N1 > 0, (top_N1 - raised_N1) * total_N1, 0.0)
                weighted_N1 = (weighted_N1 + moved_N1) * shrink_N1 + torch.linalg.vecdot(probs_NW, logits_NW)[:, None]
            else:
                probs_NW = logits_NW.exp_()
            total_N1 = total_N1 * shrink_N1 + probs_NW.sum(-1, keepdim=True)
            top_N1 = raised_N1
        lse_N1 = top_N1 + total_N1.log()
        ctx.tiles = tiles
        ctx.save_for_backward(hidden_NH, weight_VH, lse_N1)
        entropy_N = (total_N1.log() - weighted_N1 / total_N1)[:, 0]
        ctx.mark_non_differentiable(entropy_N)
        return (target_N1 - lse_N1)[:, 0], entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """By logit j: ((1 if j is the target else 0) - p_j) / temperature."""
        hidden_NH, weight_VH, lse_N1 = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        scale_N1 = grads[0][:, None] / tiles.temperature_N1
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Sums over tiles are kept wide; a row of the weight's gradient belongs to one tile and is written once.
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=lse_N1.dtype) if needs_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.empty_like(tiles.bias_V) if needs_bias and tiles.bias_V is not None else None
        part_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        for start, end, logits_NW, place_N1, here_N1 in tiles.walk():
            grad_NW = logits_NW.sub_(lse_N1).exp_().mul_(-scale_N1)
            grad_NW.scatter_add_(1, place_N1, torch.where(here_N1, scale_N1, 0.0))
            if grad_bias_V is not None:
                grad_bias_V[start:end] = grad_NW.sum(0)
            grad_NW = grad_NW.to(weight_VH.dtype)
            if grad_hidden_NH is not None and part_NH is not None:
                grad_hidden_NH += torch.mm(grad_NW, weight_VH[start:end], out=part_NH)
            if grad_weight_VH is not None:
                torch.mm(grad_NW.t(), hidden_NH, out=grad_weight_VH[start:end])
        grad_hidden = None if grad_hidden_NH is None else grad_hidden_NH.to(hidden_NH.dtype)
        return grad_hidden, grad_weight_VH, grad_bias_V, None, None
