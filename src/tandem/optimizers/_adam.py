"""Base of the Adam family: options, and torch's update of whole tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from tandem.errors import bounded
from tandem.lazy import Parameter, Tensor, torch
from tandem.optimizers._precise import PreciseStepper, TrainedWeight, whole
from tandem.optimizers.base import LARGE_PIECE, PIECE, Optimizer, ParameterPart, PartStepper, Stepper


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Options of AdamW (arXiv 1711.05101)."""

    beta1: float = bounded(0.9, below=1)
    """Decay of the gradient's running mean."""
    beta2: float = bounded(0.999, below=1)
    """Decay of the squared gradient's running mean."""
    eps: float = bounded(1e-8)
    """Added to the root of the squared gradient's mean; it matters where gradients are this small."""
    weight_decay: float = bounded(0.0)
    """Share of each weight that is subtracted per step, times the rate."""

    def bind(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Stepper:
        """Allocate moments and masters; gradients come with the first backward pass."""
        return self.bind_parts(whole(named_parameters))

    @abstractmethod
    def bind_parts(self, parts: Sequence[ParameterPart]) -> PartStepper:
        """The same for parts of parameters."""


class _FiniteGuard(NamedTuple):
    """What torch's fused kernels read on the device, so that the host need not know the norm."""

    grad_scale: Tensor | None
    """Gradients are divided by it, to clip them."""
    found_inf: Tensor | None
    """1 where nothing is to be updated or counted, else 0."""


class FloatMoments(PreciseStepper):
    """AdamW with float32 moments, by torch's fused kernels."""

    def fresh(self, weight: TrainedWeight) -> dict[str, Tensor]:
        """Two moments where the master is, or else where the weight is."""
        like = (weight.parameter if weight.master is None else weight.master).detach()
        return {
            "step": torch.zeros((), device=like.device),
            "exp_avg": torch.zeros(like.shape, device=like.device),
            "exp_avg_sq": torch.zeros(like.shape, device=like.device),
        }

    def clipped_update(self, weights: Sequence[TrainedWeight], norm: Tensor, lr: float, max_grad_norm: float) -> None:
        """Clip and skip on the device. The bits of stochastic rounding depend on the count of updates: those wait."""
        if any(weight.master is None for weight in weights):
            super().clipped_update(weights, norm, lr, max_grad_norm)
            return
        divisor = (norm / max_grad_norm).clamp(min=1.0).float() if max_grad_norm > 0 else None
        self._update(weights, lr, _FiniteGuard(divisor, (~norm.isfinite()).float()))

    def update(self, weights: Sequence[TrainedWeight], lr: float, clip: float) -> None:
        """By gradients that are finite."""
        divisor = None if clip == 1.0 else torch.full((), 1 / clip, device=weights[0].gradient.device)
        self._update(weights, lr, _FiniteGuard(divisor, None))

    def _update(self, weights: Sequence[TrainedWeight], lr: float, guard: _FiniteGuard) -> None:
        """Masters all at once, or as many as the gradients that are widened together; others piece by piece."""
        most = LARGE_PIECE if weights[0].gradient.is_cuda else PIECE
        ready = [weight for weight in weights if _is_whole(weight, most)]
        for _, run in groupby(zip(ready, accumulate(map(_widened, ready)), strict=True), lambda pair: pair[1] // most):
            batch = [weight for weight, _ in run]  # of whose gradients less than twice ``most`` are widened
            states = [self.states[weight] for weight in batch]
            masters = [weight.master.detach() for weight in batch if weight.master is not None]
            moments = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            self._adamw(lr, guard, masters, [weight.gradient.float() for weight in batch], *moments)
            self.write([weight for weight in batch if not weight.own])
        for weight in weights:
            if not _is_whole(weight, most):
                self._update_pieces(weight, lr, guard, most)

    def write(self, weights: Sequence[TrainedWeight]) -> None:
        """Round masters to their weights."""
        masters = [weight.master.detach() for weight in weights if weight.master is not None]
        if masters:
            torch._foreach_copy_([weight.parameter for weight in weights], masters)

    def _update_pieces(self, weight: TrainedWeight, lr: float, guard: _FiniteGuard, size: int) -> None:
        state = self.states[weight]
        exp_avg, exp_avg_sq = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        for value, grad, at in weight.pieces(size):
            # torch raises the count; it must be raised once, not once for each piece.
            step = state["step"].clone()
            self._adamw(lr, guard, [value], [grad], [exp_avg[at]], [exp_avg_sq[at]], [step])
        state["step"] += 1 if guard.found_inf is None else 1 - guard.found_inf

    def _adamw(self, lr: float, guard: _FiniteGuard, *tensors: list[Tensor]) -> None:
        """torch's update of values by gradients, both moments and counts, in this order."""
        from torch.optim.adamw import adamw

        update: Any = adamw  # whose arguments mypy cannot tell in a row
        rates = {name: getattr(self._options, name) for name in ("beta1", "beta2", "weight_decay", "eps")}
        how = {"fused": True, "amsgrad": False, "maximize": False, **rates, **guard._asdict()}
        *values, steps = tensors
        update(*values, [], steps, lr=lr, **how)


def _is_whole(weight: TrainedWeight, most: int) -> bool:
    """Whether it is flat, as fused kernels want it, and has at most ``most`` elements of gradient to be widened."""
    return weight.master is not None and weight.master.is_contiguous() and _widened(weight) <= most


def _widened(weight: TrainedWeight) -> int:
    """Elements of its gradient that have to be widened."""
    return 0 if weight.gradient.dtype == torch.float32 else weight.gradient.numel()
