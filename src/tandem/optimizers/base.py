"""The optimizer contract, and learning-rate schedules."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from tandem.errors import bounded, check_bounds
from tandem.lazy import Parameter, Tensor

_WIDENED = 1 << 22
"""Numbers of a narrow gradient that are widened at once, for its norm."""


PIECE = 1 << 22
"""Elements that are widened at once. The random stream has a key for each piece, so this is part of its definition."""
BLOCK = 256
"""Elements that share a scale."""
LARGE_PIECE = 8 * PIECE
"""Elements that a GPU updates at once: to begin with a piece takes the host as long as the device takes for some tens
of millions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """A trained parameter, or a run of its elements that one of several ranks updates."""

    name: str
    """The whole parameter's name."""
    parameter: Parameter
    """The whole parameter, or a flat view of its elements from ``start``."""
    start: int = 0
    """First element in the whole parameter; a multiple of ``BLOCK``."""
    of: int | None = None
    """Elements of the whole parameter; None: this is the whole."""

    @property
    def whole(self) -> int:
        """Elements of the whole parameter."""
        return self.parameter.numel() if self.of is None else self.of

    @property
    def label(self) -> str:
        """The parameter's name, with the first element of a part that is not the whole."""
        return self.name if self.of is None else f"{self.name}@{self.start}"


class Stepper(Protocol):
    """An optimizer bound to parameters."""

    def accumulate(self, parameter: Parameter) -> None:
        """Add ``parameter.grad`` to the gradient of the step and set it to None."""

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Clip, update, write the parameters in place, forget the gradients; returns the norm before clipping.

        The norm is float64 with no dimension, wherever it was computed: not to look at it is not to wait for it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resume needs, as tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Base of optimizers: update rule and learning rate. A frozen dataclass whose fields are its options.

    Example:
        >>> import tandem
        >>> from tandem.optimizers.adamw import AdamW
        >>> optimizer: tandem.Optimizer = AdamW(lr=1e-5, warmup_steps=10)
        >>> optimizer.rate(step=5, total=100)
        5e-06
    """

    states_on: ClassVar[Literal["weights", "host"]] = "weights"
    """Where the bytes of ``state_bytes`` are held: beside the weights, or in host memory wherever those are."""
    elementwise_bytes: ClassVar[int] = 0
    """Bytes a weight that a stepper's ``elementwise_state`` takes beyond ``state_bytes``."""

    lr: float = bounded(1e-6, above=0)
    """Peak learning rate, above 0 (to measure a model: tandem eval). LoRA wants about ten times a full fine-tune's."""
    warmup_steps: int = bounded(0)
    """Optimizer steps over which the rate rises linearly from lr/warmup_steps to lr."""
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """How the rate goes on after warm-up, down to min_lr_ratio at the last step; warmup_stable_decay stays at lr until
    its last decay_steps."""
    min_lr_ratio: float = bounded(0.0, most=1)
    """Last rate as a share of lr; of warmup_stable_decay the first one, too."""
    decay_steps: int = 0
    """Steps at the end in which warmup_stable_decay lowers the rate."""
    decay: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """How warmup_stable_decay lowers it."""
    max_grad_norm: float = bounded(1.0)
    """Gradients whose global L2 norm is larger are scaled down to it; 0 never clips."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.schedule == "warmup_stable_decay" and self.decay_steps < 1:
            raise ValueError("decay_steps must be at least 1 with schedule: warmup_stable_decay")

    def inert(self) -> Mapping[str, str]:
        """Options that change nothing given the others, and why."""
        unread = {"min_lr_ratio": "schedule: constant never lowers the rate"} if self.schedule == "constant" else {}
        if self.schedule != "warmup_stable_decay":
            unread |= dict.fromkeys(("decay_steps", "decay"), "schedule: warmup_stable_decay alone reads it")
        return unread

    @abstractmethod
    def bind(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Stepper:
        """Make states for the trainable parameters.

        Weights narrower than float32 must not lose updates that are smaller than their last bit. Where a parameter's
        data lies is read anew at each step: it may have moved into another process's memory meanwhile.
        """

    def rate(self, step: int, total: int) -> float:
        """Learning rate of optimizer step ``step`` (from 1) of ``total``."""
        stays = self.schedule == "warmup_stable_decay"
        if step <= self.warmup_steps:
            least = self.min_lr_ratio if stays else 0.0
            return self.lr * (least + (1.0 - least) * step / self.warmup_steps)
        start = total - self.decay_steps if stays else self.warmup_steps
        if self.schedule == "constant" or step <= start:
            return self.lr
        progress = min(1.0, (step - start) / max(1, total - start))
        match self.decay if stays else self.schedule:
            case "linear":
                share = 1.0 - progress
            case "1-sqrt":
                share = 1.0 - math.sqrt(progress)
            case _:
                share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share)

    @abstractmethod
    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """Bytes held besides the weights (masters, moments, the step's gradient), for the memory plan."""


class PartStepper(Stepper, Protocol):
    """A stepper whose gradients come from elsewhere, and whose norm is not its own alone: one rank's among several."""

    def add(self, parameter: Parameter, grad: Tensor) -> None:
        """Add a gradient of a part, which may be wider than the weights, to the gradient of the step."""

    def gradients(self) -> Mapping[Parameter, Tensor]:
        """The gradient so far of each part that has one."""

    def forget(self, parameter: Parameter) -> None:
        """Drop a part's gradient: there is none on any rank."""

    def zero_grad(self) -> None:
        """Forget the gradients of an unfinished step."""

    def update_by(self, norm: Tensor, lr: float, max_grad_norm: float) -> None:
        """Update the parts that have a gradient, clipped by this norm, unless it is not finite; forget gradients."""

    def elementwise_state(self) -> dict[str, Any]:
        """``state_dict`` in which every element of a part has its own, whatever elements the part is made of."""

    def load_elementwise_state(self, state: dict[str, Any]) -> None:
        """Inverse of ``elementwise_state``."""


@runtime_checkable
class UpdatesParts(Protocol):
    """An optimizer that computes each element by itself, so that ranks can each update a part of a parameter."""

    def bind_parts(self, parts: Sequence[ParameterPart]) -> PartStepper:
        """Make states for parts of parameters."""


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients: float32 along rows, float64 over them. A 0-d tensor, so that nothing waits.

    On CUDA float32 goes over whole tensors, in a tree of blocks. On a CPU ``torch._foreach_norm`` adds a whole
    embedding matrix up one by one, which is wrong in the fourth digit.
    """
    import torch

    if all(grad.is_cuda for grad in grads):
        # One call for all, where the others are two for each: between any two, another thread may take Python's lock.
        widest = functools.reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
        of_each = torch.stack(torch._foreach_norm(list(grads), dtype=widest))
        whole: Tensor = torch.linalg.vector_norm(of_each, dtype=torch.float64)
        return whole
    norms: list[Tensor] = []
    for grad in grads:
        rows = grad.reshape(-1, grad.shape[-1] if grad.dim() else 1)
        wide = torch.promote_types(grad.dtype, torch.float32)
        # A CPU widens a narrow tensor, all of it, before it reduces it.
        pieced = wide != grad.dtype and grad.device.type == "cpu"
        parts = rows.split(max(1, _WIDENED // rows.shape[-1])) if pieced else (rows,)
        norms += [torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in parts]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
    return norm
