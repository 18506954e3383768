"""8-bit Adam moments, scaled by blocks; computed in float32 by torch's own operations, compiled on CUDA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.model import compilation
from tandem.model.compilation import number
from tandem.optimizers._narrow import DeviceStream, on_device, write_fused
from tandem.optimizers._precise import PreciseStepper, TrainedWeight
from tandem.optimizers.base import BLOCK, LARGE_PIECE

if TYPE_CHECKING:
    from tandem.optimizers._adam import Adam

MOMENTS = ("exp_avg", "exp_avg_sq")
SMALL = 4096
"""Tensors of fewer elements (norms, biases) keep float32 moments: they weigh nothing, and need it most."""


class ByteMoments(PreciseStepper):
    """AdamW8bit bound to parameters."""

    _options: Adam

    def fresh(self, weight: TrainedWeight) -> dict[str, Tensor]:
        """Codes and scales of 0: whatever a code stands for, 0 times it is 0."""
        num, device = weight.parameter.numel(), weight.parameter.device
        state = {"step": torch.zeros(())}
        for moment in MOMENTS:
            if weight.part.whole < SMALL:
                state[moment] = torch.zeros(weight.parameter.shape, device=device)
            else:
                state[f"{moment}.codes"] = torch.zeros(num, dtype=torch.uint8, device=device)
                state[f"{moment}.scales"] = torch.zeros(math.ceil(num / BLOCK), device=device)
        return state

    def update(self, weights: Sequence[TrainedWeight], lr: float, clip: float) -> None:
        """Piece by piece: float32 moments exist for one piece at a time."""
        numbers: dict[tuple[int, torch.device], _Numbers] = {}  # mostly one: made once, not for each piece
        for weight in weights:
            state, device = self.states[weight], weight.gradient.device
            state["step"] += 1
            if (key := (weight.steps, device)) not in numbers:
                numbers[key] = self._numbers(weight.steps, lr, clip, weight.gradient)
            if not compilation.fuses(device):
                for value, grad, at in weight.pieces(clip=clip):
                    avg, avg_sq = (_moment(state, moment, at) for moment in MOMENTS)
                    _advance(value, grad, avg, avg_sq, numbers[key])
                continue
            for kept, grad, at in weight.kept(LARGE_PIECE):
                avg, avg_sq = (_moment(state, moment, at) for moment in MOMENTS)
                random = None if weight.master is not None else on_device(*weight.keys(at), kept)
                # What does not end with a block would be compiled apart; it is rare.
                advance = _advance_kept if len(kept) % BLOCK and isinstance(avg, _Moment) else _fused_advance
                advance(kept, grad, avg, avg_sq, numbers[key], random)

    def _numbers(self, steps: int, lr: float, clip: float, like: Tensor) -> _Numbers:
        options = self._options
        return _Numbers(
            options.beta1,
            options.beta2,
            options.eps,
            number(1 - lr * options.weight_decay, like),
            number(math.sqrt(1 - options.beta2**steps), like),
            number(lr / (1 - options.beta1**steps), like),
            number(clip, like),
        )

    def elementwise_state(self) -> dict[str, Any]:
        """Moments in float32, on the host: to write what was read gives the same codes and scales."""
        states = self.state_dict()
        for label, moment, shape in self._moments():
            del states[f"{label}.codes"], states[f"{label}.scales"]
            states[label] = _read(moment).view(shape).cpu()
        return states

    def load_elementwise_state(self, state: dict[str, Any]) -> None:
        """Round the moments to codes again; parts that are cut otherwise have other blocks."""
        states, live = dict(state), self.state_dict()
        for label, moment, _ in self._moments():
            if label in states:
                _write(moment, states.pop(label).view(-1).to(moment.codes_n.device))
                states |= {key: live[key] for key in (f"{label}.codes", f"{label}.scales")}
        self.load_state_dict(states)

    def _moments(self) -> Iterator[tuple[str, _Moment, torch.Size]]:
        """Those of bytes, by their place in ``state_dict``, and the shape of their parameters."""
        for weight in self.weights:
            for name in MOMENTS:
                moment = _moment(self.states[weight], name, slice(0, weight.parameter.numel()))
                if isinstance(moment, _Moment):
                    yield f"{weight.part.label}/{name}", moment, weight.parameter.shape


class _Numbers(NamedTuple):
    """Of one step: those that no step changes, and those that each does."""

    beta1: float
    beta2: float
    eps: float
    decay: float | Tensor
    root_correction: float | Tensor
    rate: float | Tensor
    clip: float | Tensor
    """What gradients that are not clipped yet are multiplied by."""


class _Moment(NamedTuple):
    """A piece of a moment, n elements."""

    codes_n: Tensor
    scales_b: Tensor
    """One for each block of the piece."""
    book: Tensor
    nearest: Tensor


def _moment(state: dict[str, Tensor], moment: str, at: slice) -> _Moment | Tensor:
    """Of bytes, or float32."""
    if moment in state:
        return state[moment].view(-1)[at]
    codes_n = state[f"{moment}.codes"][at]
    tables = {"signed": moment == "exp_avg", "device": codes_n.device}
    blocks = slice(at.start // BLOCK, math.ceil(at.stop / BLOCK))  # a piece begins at the first element of a block
    return _Moment(codes_n, state[f"{moment}.scales"][blocks], _book(**tables), _nearest(**tables))


def _advance(value: Tensor, grad: Tensor, avg: _Moment | Tensor, avg_sq: _Moment | Tensor, numbers: _Numbers) -> None:
    """Update a piece and what is kept of its moments. The update is by the moments as computed."""
    exp_avg, exp_avg_sq = (_read(m) if isinstance(m, _Moment) else m for m in (avg, avg_sq))
    exp_avg.lerp_(grad, 1 - numbers.beta1)
    exp_avg_sq.mul_(numbers.beta2).addcmul_(grad, grad, value=1 - numbers.beta2)
    if isinstance(avg, _Moment) and isinstance(avg_sq, _Moment):
        _write(avg, exp_avg)
        _write(avg_sq, exp_avg_sq)
    root = exp_avg_sq.sqrt().div_(numbers.root_correction).add_(numbers.eps)
    value.mul_(numbers.decay).sub_((exp_avg / root).mul_(numbers.rate))


def _advance_kept(
    kept: Tensor,
    grad: Tensor,
    avg: _Moment | Tensor,
    avg_sq: _Moment | Tensor,
    numbers: _Numbers,
    random: DeviceStream | None,
) -> None:
    """The same of weights and gradients as they are kept, for a compiler: float32 copies need not be in memory."""
    value = kept.float()  # itself if it is float32
    _advance(value, grad.float() * numbers.clip, avg, avg_sq, numbers)
    if random is not None:
        write_fused(kept, value, random)


_fused_advance = compilation.fused(_advance_kept)


def _read(moments: _Moment) -> Tensor:
    """A moment in float32."""
    # index_select is five times as fast as an index on a CPU.
    moment = _in_blocks(moments.book.index_select(0, moments.codes_n.int())).mul_(moments.scales_b[:, None])
    return moment.view(-1)[: len(moments.codes_n)]


def _write(moments: _Moment, value: Tensor) -> None:
    """Round a moment to its nearest codes."""
    blocks = _in_blocks(value)
    most, least = blocks.amax(1), blocks.amin(1)
    # The largest of a block has code 1 whatever its sign, so that what is read has the scales that it was read by.
    scales = torch.where(most >= -least, most, least)
    tiny = torch.finfo(torch.float32).tiny
    shares = blocks / torch.where(scales < 0, scales.clamp_max(-tiny), scales.clamp_min(tiny))[:, None]
    # A cell is the upper 20 bits of float32 numbers: sign, exponent and 11 bits of mantissa.
    cells = (shares.view(-1).view(torch.int32) >> 12).bitwise_and_(0xFFFFF)
    moments.codes_n.copy_(moments.nearest.index_select(0, cells)[: len(value)])
    moments.scales_b.copy_(scales)


def _in_blocks(flat: Tensor) -> Tensor:
    """One row for each block; the last is filled up with zeros."""
    short = -len(flat) % BLOCK
    return (pad(flat, (0, short)) if short else flat).view(-1, BLOCK)


@cache
def _nearest(*, signed: bool, device: torch.device) -> Tensor:
    """The nearest code of the middle of each cell, found by looking rather than by searching the book each time."""
    book = _book(signed=signed, device=device)
    middles = ((torch.arange(1 << 20, dtype=torch.int32, device=device) << 12) + (1 << 11)).view(torch.float32)
    codes = torch.bucketize(middles, (book[1:] + book[:-1]) / 2).to(torch.uint8)
    # A squared gradient that vanishes beside its block's largest must not become 0: the update divides by its root.
    return codes if signed else codes.clamp_(min=1)


@cache
def _book(*, signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers, ascending from -1 or 0 to 1, that a byte stands for: dynamic tree quantisation.

    Each of seven decades below 1 gets twice as many, evenly spaced, as the decade beneath it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        intervals = 2**decade * (1 if signed else 2)
        edges = [0.1 + 0.9 * i / intervals for i in range(intervals + 1)]
        means = [10.0 ** (decade - 6) * (low + high) / 2 for low, high in pairwise(edges)]
        values += means + ([-mean for mean in means] if signed else [])
    return torch.tensor(sorted(values), device=device)
