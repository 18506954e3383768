"""AdamW with moments of one byte (arXiv 2110.02861)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from tandem.optimizers._adam import Adam
from tandem.optimizers._slots import FLOAT, Precise, Slot, Slots
from tandem.optimizers.base import Stepper

BLOCK = 256
"""Elements that share a scale."""
SMALL = 4096
"""Tensors of fewer elements (norms, biases) keep float32 moments: they weigh nothing, and need it most."""


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(Adam, Precise):
    """AdamW whose two moments take a byte each, scaled by blocks of 256; computed in float32.

    Plain torch operations on any device: no compiler, and the same bits after a resume.
    """

    def bind(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Stepper:
        """Allocate codes, scales and what ``precision`` needs."""
        return _ByteMoments(self, [Slot(name, parameter, self.precision) for name, parameter in named_parameters])

    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """Two codes, two scales a block, the gradient and what ``precision`` keeps beside narrow weights."""
        each = 2 + FLOAT + self.narrow_bytes(parameter_bytes)
        return num_parameters * each + 2 * FLOAT * math.ceil(num_parameters / BLOCK)


class _ByteMoments(Slots):
    """AdamW8bit bound to parameters."""

    def __init__(self, options: AdamW8bit, slots: Sequence[Slot]):
        self._options = options
        super().__init__(slots)

    def fresh(self, slot: Slot) -> dict[str, Tensor]:
        """Codes and scales of 0: whatever a code stands for, 0 times it is 0."""
        num, device = slot.parameter.numel(), slot.parameter.device
        state = {"step": torch.zeros(())}
        for moment in ("exp_avg", "exp_avg_sq"):
            if num < SMALL:
                state[moment] = torch.zeros(num, device=device)
            else:
                state[f"{moment}.codes"] = torch.zeros(num, dtype=torch.uint8, device=device)
                state[f"{moment}.scales"] = torch.zeros(math.ceil(num / BLOCK), device=device)
        return state

    def update(self, slots: Sequence[Slot], lr: float) -> None:
        """Piece by piece: float32 moments exist for one piece at a time."""
        for slot in slots:
            state = self.states[slot]
            state["step"] += 1
            grad = slot.gradient.reshape(-1)
            for value, at in slot.pieces():
                self._piece(value, grad[at], state, at, slot.steps, lr)

    def _piece(self, value: Tensor, grad: Tensor, state: dict[str, Tensor], at: slice, steps: int, lr: float) -> None:
        options = self._options
        exp_avg = _read(state, "exp_avg", at).lerp_(grad, 1 - options.beta1)
        exp_avg_sq = _read(state, "exp_avg_sq", at).mul_(options.beta2).addcmul_(grad, grad, value=1 - options.beta2)
        _write(state, "exp_avg", at, exp_avg)
        _write(state, "exp_avg_sq", at, exp_avg_sq)
        # The update is by the moments as computed; only what is kept for the next step is rounded.
        root = exp_avg_sq.sqrt_().div_(math.sqrt(1 - options.beta2**steps)).add_(options.eps)
        value.mul_(1 - lr * options.weight_decay)
        value.addcdiv_(exp_avg, root, value=-lr / (1 - options.beta1**steps))


def _read(state: dict[str, Tensor], moment: str, at: slice) -> Tensor:
    """A piece of a moment in float32, to be changed freely."""
    if moment in state:
        return state[moment][at].clone()
    codes = state[f"{moment}.codes"][at]
    scales = state[f"{moment}.scales"][_blocks(at)]
    book = _book(signed=moment == "exp_avg", device=codes.device)
    # index_select is five times as fast as an index on a CPU.
    return _in_blocks(book.index_select(0, codes.int())).mul_(scales[:, None]).view(-1)[: len(codes)]


def _write(state: dict[str, Tensor], moment: str, at: slice, value: Tensor) -> None:
    """Round a piece of a moment to its nearest codes."""
    if moment in state:
        state[moment][at].copy_(value)
        return
    signed = moment == "exp_avg"
    blocks = _in_blocks(value)
    scales = blocks.abs().amax(1)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = _nearest(signed=signed, device=value.device).index_select(0, _cells(shares.view(-1)))
    state[f"{moment}.codes"][at].copy_(codes[: len(value)])
    state[f"{moment}.scales"][_blocks(at)].copy_(scales)


def _blocks(at: slice) -> slice:
    """Scales of a piece, which begins at the first element of a block."""
    return slice(at.start // BLOCK, math.ceil(at.stop / BLOCK))


def _in_blocks(flat: Tensor) -> Tensor:
    """One row for each block; the last is filled up with zeros."""
    return pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _cells(shares: Tensor) -> Tensor:
    """The upper 20 bits of float32 numbers: sign, exponent and 11 bits of mantissa."""
    return (shares.view(torch.int32) >> 12).bitwise_and_(0xFFFFF)


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
