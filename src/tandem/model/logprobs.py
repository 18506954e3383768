"""Token logprobs from the last hidden states, in tiles: no full matrix of logits is ever held.

The vocabulary is walked in tiles: a tile is [tokens, some of the vocabulary], a few million numbers however
long the micro-batch and large the vocabulary, so that it stays in cache and peak memory does not grow with
tokens x vocabulary. The backward pass recomputes the tiles. Each row of the weight's gradient is complete
after its own tile, so no float32 copy of it is needed.

Where the weight is frozen nothing is recomputed: the gradient of a logprob by its hidden state needs no gradient from
above but as a factor, so it is summed up in the forward pass, tile by tile as the logprob is.

A tile is one product and then arithmetic on each of its numbers: ``absorb`` in the forward pass, ``slope`` in the
backward pass. Eager they run over the tile in float32 a handful of times; compiled each reads the product once or twice
and holds no float32 tile at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.model import compilation
from tandem.model.compilation import Compile
from tandem.model.penalties import OUTSIDE, Part, TokenHistory, penalise
from tandem.model.sampling import threshold

TILE_CPU = 3 << 20
"""Logits held at once on a CPU: 12 MB of float32, about a last-level cache's share."""
TILE_GPU = 64 << 20
"""Logits held at once on an accelerator: 256 MB of float32, enough to fill it."""

_FEW = 512
"""Rows of a tile: of fewer, a GPU of 256 multiprocessors has not two for each."""


class LogitEnd(NamedTuple):
    """What some models do to their head's logits: ``cap * tanh(scale * logits / cap)``."""

    scale: float
    cap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        """The logits that the model gives."""
        logits = logits * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def write(self, logits: Tensor) -> Tensor | None:
        """Do so in place; returns the slope of what the cap does."""
        if self.cap is None:
            logits.mul_(self.scale)
            return None
        outside = logits <= OUTSIDE
        slope = 1 - logits.mul_(self.scale / self.cap).tanh_().square()
        logits.mul_(self.cap).masked_fill_(outside, OUTSIDE)
        return slope


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    end: LogitEnd | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    history: TokenHistory | None = None,
    entropy: bool = False,
    tile: int | None = None,
    compile: Compile = False,
) -> tuple[Tensor, Tensor | None]:
    """Logprob of each target under the distribution it was sampled from; float32, differentiable.

    Args:
        hidden_NH: last hidden states, in the weight's dtype; gets a gradient if it needs one.
        weight_VH: the output embedding; gets a gradient if it needs one (not when frozen).
        targets_N: int64 token ids.
        temperature: above 0, one for all or float32 per token; logits are divided by it.
        bias: of the output embedding.
        end: what the model does to its head's logits.
        top_p: with top_k and min_p the support the tokens were sampled from; a target is always counted in, since
            the logits here may differ in the last bit from those it was drawn from.
        top_k: see top_p.
        min_p: see top_p.
        history: penalties, and what was before each token; a target that they leave out is counted in all the same.
        entropy: also return the entropy of each distribution in nats (float32, no gradient); costs a pass.
        tile: most logits held at once; by default as fits the device.
        compile: the arithmetic on a tile; the last bits of the result may differ from those of eager.

    Returns:
        The logprobs, and the entropies or None. Sums are float32 (float64 for a float64 weight).
    """
    wide = torch.promote_types(weight_VH.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        temperature_N1 = temperature.to(hidden_NH.device, wide).reshape(-1, 1).expand(targets_N.numel(), 1)
    else:  # filled in where it is: a number that is sent to a device is waited for
        temperature_N1 = torch.full((targets_N.numel(), 1), temperature, dtype=wide, device=hidden_NH.device)
    tiles = _Tiles(
        hidden_NH=hidden_NH.detach(),
        weight_VH=weight_VH.detach(),
        bias_V=None if bias is None else bias.detach(),
        end=end,
        targets_N1=targets_N[:, None],
        temperature_N1=temperature_N1,
        history=history,
        tile=tile or (TILE_CPU if hidden_NH.device.type == "cpu" else TILE_GPU),
        compiles=compilation.decide(compile, hidden_NH.device),
    )
    if top_p < 1.0 or top_k > 0 or min_p > 0.0:
        tiles.edge_N1 = tiles.support_edge(top_p, top_k, min_p)
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, tiles, entropy
    )
    return logprobs_N, entropy_N if entropy else None


class _Tile(NamedTuple):
    """Some logits as the head's product gives them, and all that is known of their rows and columns."""

    product_NW: Tensor
    wide_NW: Tensor | None
    """Memory for the same in the type that is computed in; None: it is made."""
    bias_W: Tensor | None
    at_N1: Tensor
    """Column of each row's target, counted from the tile's first: it may be outside."""
    temperature_N1: Tensor
    edge_N1: Tensor | None
    """Smallest logit of the support, where there is one."""
    part: Part | None
    """Penalties of the tile, where there are any."""
    end: LogitEnd | None


class _Sums(NamedTuple):
    """An online logsumexp: ``total`` is the sum of exp(logit - top) over the tiles so far."""

    top_N1: Tensor
    total_N1: Tensor
    target_N1: Tensor
    """The target's logit, once its tile has been seen."""
    weighted_N1: Tensor | None
    """Sum of exp(logit - top) * (logit - top), for the entropy."""


def absorb(tile: _Tile, s: _Sums) -> _Sums:
    """The sums with one more tile in them."""
    return _absorbed(tile, s)[0]


def absorb_and_keep(tile: _Tile, s: _Sums) -> tuple[_Sums, Tensor, Tensor]:
    """The same, by how much what was summed before shrinks, and exp(logit - top) of all but targets as a tile is."""
    sums, shrink_N1, probs_NW, place_N1, here_N1 = _absorbed(tile, s)
    others_N1 = torch.where(here_N1, 0.0, probs_NW.gather(1, place_N1))
    kept_NW = probs_NW.to(tile.product_NW.dtype)
    return sums, shrink_N1, kept_NW.scatter_(1, place_N1, others_N1.to(kept_NW.dtype))


def slope(tile: _Tile, lse_N1: Tensor, scale_N1: Tensor) -> Tensor:
    """Gradient of a tile's logits before all that is done to them, in their type.

    It is scale * (1 if the target, else 0 - p), times the slope of what penalties do.
    """
    logits_NW, place_N1, here_N1, slope_NW = _finished(tile)
    probs_NW = logits_NW.sub_(lse_N1).exp_()
    # The target's own before anything is rounded: where p is near 1, so is what it is taken from.
    target_N1 = probs_NW.gather(1, place_N1)
    own_N1 = scale_N1 * (here_N1.to(target_N1.dtype) - target_N1)
    probs_NW.mul_(-scale_N1)
    if slope_NW is not None:
        own_N1 *= slope_NW.gather(1, place_N1)
        probs_NW.mul_(slope_NW)
    grad_NW = probs_NW.to(tile.product_NW.dtype)
    return grad_NW.scatter_(1, place_N1, own_N1.to(grad_NW.dtype))


def _absorbed(tile: _Tile, s: _Sums) -> tuple[_Sums, Tensor, Tensor, Tensor, Tensor]:
    """The sums; the factor to the top before; exp(logit - top); where the target's column is, and if it is here."""
    logits_NW, place_N1, here_N1, _ = _finished(tile)
    target_N1 = torch.where(here_N1, logits_NW.gather(1, place_N1), s.target_N1)
    raised_N1 = torch.maximum(s.top_N1, logits_NW.amax(-1, keepdim=True))
    shrink_N1 = (s.top_N1 - raised_N1).exp()
    logits_NW.sub_(raised_N1)
    weighted_N1 = None
    if s.weighted_N1 is None:
        probs_NW = logits_NW.exp_()
    else:
        probs_NW = logits_NW.exp()
        moved_N1 = torch.where(s.total_N1 > 0, (s.top_N1 - raised_N1) * s.total_N1, 0.0)
        weighted_N1 = (s.weighted_N1 + moved_N1) * shrink_N1 + torch.linalg.vecdot(probs_NW, logits_NW)[:, None]
    sums = _Sums(raised_N1, s.total_N1 * shrink_N1 + probs_NW.sum(-1, keepdim=True), target_N1, weighted_N1)
    return sums, shrink_N1, probs_NW, place_N1, here_N1


def _finished(tile: _Tile) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Wide logits with all that is done to them; where the target's column is, and if it is here; penalties' slope.

    The logits are in ``wide_NW`` if that is given, and may be in ``product_NW``.
    """
    product_NW, wide_NW = tile.product_NW, tile.wide_NW
    here_N1 = (tile.at_N1 >= 0) & (tile.at_N1 < product_NW.shape[1])
    place_N1 = tile.at_N1.clamp(0, product_NW.shape[1] - 1)
    logits_NW = product_NW.to(tile.temperature_N1.dtype) if wide_NW is None else wide_NW.copy_(product_NW)
    if tile.bias_W is not None:
        logits_NW.add_(tile.bias_W)
    slope_NW = None if tile.end is None else tile.end.write(logits_NW)
    if tile.part is not None and (penalty_NW := penalise(logits_NW, *tile.part)) is not None:
        slope_NW = penalty_NW if slope_NW is None else slope_NW.mul_(penalty_NW)
    logits_NW.div_(tile.temperature_N1)
    if tile.edge_N1 is not None:
        target_N1 = logits_NW.gather(1, place_N1)
        logits_NW.masked_fill_(logits_NW < tile.edge_N1, OUTSIDE)
        kept_N1 = torch.where(here_N1, target_N1, logits_NW.gather(1, place_N1))
        logits_NW.scatter_(1, place_N1, kept_N1)
    return logits_NW, place_N1, here_N1, slope_NW


@dataclass(slots=True, kw_only=True)
class _Tiles:
    """Walks the logits tile by tile, always with the same arithmetic, so that backward sees forward's numbers."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    end: LogitEnd | None
    targets_N1: Tensor
    temperature_N1: Tensor
    history: TokenHistory | None
    tile: int
    """Most logits held at once."""
    compiles: bool
    edge_N1: Tensor | None = None
    """Where each row's support ends, if it does."""

    def walk(self, function: Callable[..., Any]) -> Iterator[tuple[int, int, Callable[..., Any]]]:
        """Yield (start, end, ``function`` with a tile's logits and all that is known of its rows)."""
        num, vocab = self.targets_N1.shape[0], self.weight_VH.shape[0]
        width = min(vocab, max(64, self.tile // max(1, num) // 64 * 64))
        # A tile takes the place of the one before it.
        narrow = self.hidden_NH.new_empty(num * width)
        widened = self.temperature_N1.dtype != narrow.dtype and not self.compiles
        wide = self.temperature_N1.new_empty(num * width) if widened else None
        # The compiler chooses by the sizes that it sees first: each of few rows it divides among several blocks of a
        # GPU, which takes thirteen times as long for thousands of rows.
        part = f"{function.__name__} of {'few' if num < _FEW else 'many'} logprobs"
        run = compilation.for_any_size(function, part) if self.compiles else function
        for start in range(0, vocab, width):
            end = min(vocab, start + width)
            size = num * (end - start)
            product_NW = narrow[:size].view(num, end - start)
            torch.mm(self.hidden_NH, self.weight_VH[start:end].t(), out=product_NW)
            wide_NW = None if wide is None else wide[:size].view_as(product_NW)
            yield start, end, partial(run, self._tile(product_NW, wide_NW, (0, num), (start, end)))

    def _tile(
        self, product_NW: Tensor, wide_NW: Tensor | None, rows: tuple[int, int], columns: tuple[int, int]
    ) -> _Tile:
        """The tile of these rows and columns, without the tokens that would end an answer too early."""
        targets_N1, part = self.targets_N1[slice(*rows)], None
        if self.history is not None:
            self.history.bar(product_NW, targets_N1, rows, columns)
            part = self.history.part(rows, columns)
        bias_W = None if self.bias_V is None else self.bias_V[slice(*columns)]
        temperature_N1 = self.temperature_N1[slice(*rows)]
        # The first column goes in by a tensor: of a number, the compiler would keep code for 0 apart.
        return _Tile(product_NW, wide_NW, bias_W, targets_N1 - columns[0], temperature_N1, self.edge_N1, part, self.end)

    def support_edge(self, top_p: float, top_k: int, min_p: float) -> Tensor:
        """Where each row's support ends. It needs whole rows, so it takes a few rows at a time.

        It lies half-way between the lowest logit within and the highest one without: products of another shape differ
        in the last bits, and would else drop the token that is the edge.
        """
        num, vocab = self.targets_N1.shape[0], self.weight_VH.shape[0]
        rows = max(1, self.tile // vocab)
        edges = [self.temperature_N1.new_empty(0, 1)]
        for start in range(0, num, rows):
            end = min(num, start + rows)
            product_CV = self.hidden_NH[start:end] @ self.weight_VH.t()
            logits_CV = _finished(self._tile(product_CV, None, (start, end), (0, vocab)))[0]
            edge_C = threshold(logits_CV, top_p, top_k, min_p)
            if edge_C is not None:
                within_CV = logits_CV >= edge_C[:, None]
                lowest_C1 = logits_CV.masked_fill(~within_CV, math.inf).amin(-1, keepdim=True)
                beyond_C1 = logits_CV.masked_fill_(within_CV, -math.inf).amax(-1, keepdim=True)
                middle_C1 = (lowest_C1 + beyond_C1) / 2
                # Neighbours have no number between them; where nothing is without, the edge is -inf.
                apart_C1 = (middle_C1 > beyond_C1) | beyond_C1.isneginf()
                edges.append(torch.where(apart_C1, middle_C1, lowest_C1))
        return torch.cat(edges)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, tiles: _Tiles, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        top_N1 = torch.full_like(tiles.temperature_N1, -math.inf, memory_format=torch.contiguous_format)
        # Each a tensor of its own: for one that is given twice the compiler would keep code apart.
        total_N1, target_N1, weighted_N1 = (torch.zeros_like(top_N1) for _ in range(3))
        sums = _Sums(top_N1, total_N1, target_N1, weighted_N1 if entropy else None)
        needs_hidden, *needs_others = ctx.needs_input_grad[:3]
        # A penalty's or a cap's slope would have to be kept for the target too.
        caps = tiles.end is not None and tiles.end.cap is not None
        ctx.keeps = needs_hidden and not any(needs_others) and tiles.history is None and not caps
        others_NH = torch.zeros_like(hidden_NH, dtype=top_N1.dtype) if ctx.keeps else None
        if others_NH is None:
            for _, _, absorbed in tiles.walk(absorb):
                sums = absorbed(sums)
        else:
            part_NH = torch.empty_like(hidden_NH)
            for start, end, absorbed in tiles.walk(absorb_and_keep):
                sums, shrink_N1, kept_NW = absorbed(sums)
                torch.mm(kept_NW, weight_VH[start:end], out=part_NH)
                torch.addcmul(part_NH, others_NH, shrink_N1, out=others_NH)
        lse_N1 = sums.top_N1 + sums.total_N1.log()
        logprobs_N1 = sums.target_N1 - lse_N1
        ctx.tiles = tiles
        if others_NH is None:
            ctx.save_for_backward(hidden_NH, weight_VH, lse_N1)
        else:
            # 1 - p before anything is rounded, as in ``slope``.
            own_NH = weight_VH.index_select(0, tiles.targets_N1[:, 0]) * -logprobs_N1.expm1()
            ctx.save_for_backward(own_NH.sub_(others_NH.div_(sums.total_N1)))
        if sums.weighted_N1 is not None:
            weighted_N1 = sums.weighted_N1
        entropy_N = (sums.total_N1.log() - weighted_N1 / sums.total_N1)[:, 0]
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N1[:, 0], entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """By logit j: ((1 if j is the target else 0) - p_j) / temperature."""
        tiles: _Tiles = ctx.tiles
        scale_N1 = grads[0][:, None] / tiles.temperature_N1
        if tiles.end is not None:
            scale_N1 *= tiles.end.scale
        if ctx.keeps:
            (slope_NH,) = ctx.saved_tensors
            return (slope_NH * scale_N1).to(tiles.hidden_NH.dtype), None, None, None, None
        hidden_NH, weight_VH, lse_N1 = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Sums over tiles are kept wide; a row of the weight's gradient belongs to one tile and is written once.
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=lse_N1.dtype) if needs_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.empty_like(tiles.bias_V) if needs_bias and tiles.bias_V is not None else None
        part_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        for start, end, sloped in tiles.walk(slope):
            grad_NW = sloped(lse_N1, scale_N1)
            if grad_bias_V is not None:
                grad_bias_V[start:end] = grad_NW.sum(0, dtype=lse_N1.dtype)
            if grad_hidden_NH is not None and part_NH is not None:
                grad_hidden_NH += torch.mm(grad_NW, weight_VH[start:end], out=part_NH)
            if grad_weight_VH is not None:
                torch.mm(grad_NW.t(), hidden_NH, out=grad_weight_VH[start:end])
        grad_hidden = None if grad_hidden_NH is None else grad_hidden_NH.to(hidden_NH.dtype)
        return grad_hidden, grad_weight_VH, grad_bias_V, None, None
