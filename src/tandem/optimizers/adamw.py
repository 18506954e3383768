"""AdamW (arXiv 1711.05101) over float32 masters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.errors import CheckpointError
from tandem.optimizers.base import Optimizer, Stepper, global_norm

_FLOAT = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW in float32. Narrower weights get a float32 master each and are written from it, rounded to nearest.

    Without masters a step of 1e-6 on a bfloat16 weight rounds to nothing: it is under a hundredth of the weight's
    last bit.
    """

    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.999
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the root of the squared gradient's mean; it matters where gradients are this small."""
    weight_decay: float = 0.0
    """Share of each weight that is subtracted per step, times the rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1")
        for name in ("eps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite")

    def bind(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Stepper:
        """Allocate masters and moments; the gradient's buffers come with the first backward pass."""
        return _Masters(self, named_parameters)

    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """Two moments, the gradient and, beside weights narrower than float32, the master."""
        return num_parameters * _FLOAT * (3 if parameter_bytes >= _FLOAT else 4)


class _Slot:
    """One parameter, its master (itself if it is float32 already) and the gradient of the step so far."""

    def __init__(self, name: str, parameter: Parameter):
        self.name = name
        self.parameter = parameter
        self.own = parameter.dtype == torch.float32
        self.master = parameter if self.own else Parameter(parameter.detach().float())
        self.buffer: Tensor | None = None
        self.started = False

    def add(self, grad: Tensor) -> None:
        """Add a micro-batch's gradient. The first of a step is moved or copied in, so nothing has to be zeroed."""
        if self.started:
            assert self.buffer is not None
            self.buffer.add_(grad)
        elif self.own:
            self.buffer = grad
        elif self.buffer is None:
            self.buffer = grad.float()
        else:
            self.buffer.copy_(grad)
        self.started = True

    def forget(self) -> None:
        """Drop the gradient. A narrow weight keeps the buffer: fresh pages cost more than a copy into old ones."""
        self.started = False
        if self.own:
            self.buffer = None
        self.master.grad = None


class _Masters:
    """AdamW bound to parameters; a ``Stepper``."""

    def __init__(self, options: AdamW, named_parameters: Sequence[tuple[str, Parameter]]):
        self._slots = [_Slot(name, parameter) for name, parameter in named_parameters]
        self._slot_of = {slot.parameter: slot for slot in self._slots}
        self._adamw = torch.optim.AdamW(
            [slot.master for slot in self._slots],
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        for slot in self._slots:  # as torch would at the first step; now, so that what does not fit fails now
            master = slot.master.detach()
            self._adamw.state[slot.master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def accumulate(self, parameter: Parameter) -> None:
        """Add ``parameter.grad`` to the step's float32 gradient and set it to None; a post-accumulate hook."""
        if parameter.grad is not None:
            self._slot_of[parameter].add(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float) -> float:
        """Clip, update, write the weights in place and forget the gradient; returns the norm before clipping.

        A norm that is not finite is returned with nothing updated: weights and moments stay as they were.
        """
        slots = [slot for slot in self._slots if slot.started]
        grads = [slot.buffer for slot in slots if slot.buffer is not None]
        norm = float(global_norm(grads)) if grads else 0.0
        if grads and math.isfinite(norm):
            if 0.0 < max_grad_norm < norm:
                torch._foreach_mul_(grads, max_grad_norm / norm)
            self._update(slots, lr)
        self.zero_grad()
        return norm

    def _update(self, slots: list[_Slot], lr: float) -> None:
        for slot in slots:
            slot.master.grad = slot.buffer
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        narrow = [slot for slot in slots if not slot.own]
        if narrow:
            torch._foreach_copy_([slot.parameter for slot in narrow], [slot.master for slot in narrow])

    def zero_grad(self) -> None:
        """Forget the gradient of an unfinished step, and those still on the parameters."""
        for slot in self._slots:
            slot.parameter.grad = None
            slot.forget()

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, not copies: ``<parameter>/step``, ``/exp_avg``, ``/exp_avg_sq`` and, if narrow, ``/master``."""
        out: dict[str, Any] = {}
        for slot in self._slots:
            out.update({f"{slot.name}/{key}": value for key, value in self._adamw.state[slot.master].items()})
            if not slot.own:
                out[f"{slot.name}/master"] = slot.master.detach()
        return out

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy what ``state_dict`` gave into this optimizer's own tensors. Weights are not touched.

        Raises:
            CheckpointError: it is the state of other parameters.
        """
        mine = self.state_dict()
        wrong = sorted(mine.keys() ^ state.keys()) or [n for n, t in mine.items() if t.shape != state[n].shape]
        if wrong:
            raise CheckpointError(
                f"the optimizer state is of other parameters: {len(wrong)} entries do not match, first {wrong[0]!r}; "
                "resume with the recipe that the checkpoint was made with"
            )
        for name, tensor in mine.items():
            tensor.copy_(state[name])
