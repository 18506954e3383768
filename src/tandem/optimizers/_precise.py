"""Base of the optimizers: accumulate gradients, clip, skip non-finite ones, write weights, keep state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import CheckpointError, ConfigError
from tandem.lazy import Parameter, Tensor, torch
from tandem.optimizers.base import PIECE, Optimizer, ParameterPart, global_norm

FLOAT = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class Precise(Optimizer):
    """Options of optimizers that update weights where they are."""

    precision: Literal["masters", "stochastic"] = "masters"
    """How bfloat16 weights take small updates: masters keeps a float32 copy of each (4 bytes); stochastic
    nothing, it rounds at random and is right in the mean. float32 weights need neither."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """What gradients of bfloat16 weights are added up in over a step's micro-batches: float32 (4 bytes), or bfloat16
    (2 bytes), where the first is kept as it is and each further one rounds the sum by at most 2^-8 of itself. One
    micro-batch loses nothing; more than some dozens want float32. float32 weights have float32 gradients."""

    def precise_bytes(self, parameter_bytes: int) -> int:
        """Bytes of the gradient of a weight of this width, and of the master that a narrow one needs."""
        if parameter_bytes >= FLOAT:
            return FLOAT
        return (FLOAT if self.gradients == "float32" else 2) + (FLOAT if self.precision == "masters" else 0)

    def weights(self, parts: Iterable[ParameterPart]) -> list[TrainedWeight]:
        """What updates each parameter, or part of one.

        Raises:
            ConfigError: ``precision`` or ``gradients`` is not for weights of their type.
        """
        return [TrainedWeight(part, self.precision, narrow_gradient=self.gradients == "bfloat16") for part in parts]


def whole(named_parameters: Iterable[tuple[str, Parameter]]) -> list[ParameterPart]:
    """Parameters that are updated whole."""
    return [ParameterPart(name=name, parameter=parameter) for name, parameter in named_parameters]


class TrainedWeight:
    """One parameter: its gradient so far and how it is written.

    Args:
        part: what is trained.
        precision: an option of ``Precise``.
        device: where master and gradient are kept, whatever the parameter's type and place; by default beside it.
        narrow_gradient: the gradient of a bfloat16 parameter is summed in bfloat16.
    """

    def __init__(
        self,
        part: ParameterPart,
        precision: str,
        device: torch.device | None = None,
        *,
        narrow_gradient: bool = False,
    ):
        name, parameter = part.name, part.parameter
        weights = parameter.detach()
        home = device or weights.device
        self.part = part
        self.parameter = parameter
        self.own = weights.dtype == torch.float32 and device is None
        """The parameter is its own master."""
        self.keeps = self.own or narrow_gradient
        """A step's first gradient is kept as it comes; further ones are added to it, in its type."""
        self.master: Parameter | None = None
        """None: nothing is kept of what rounding takes off, which is stochastic."""
        self.buffer: Tensor | None = None
        self.started = False
        self.steps = 0
        if self.own:
            self.master = parameter
        elif narrow_gradient and weights.dtype != torch.bfloat16:
            raise ConfigError(f"optimizer.gradients: bfloat16 is not for {name} of {weights.dtype}; take float32")
        elif precision == "masters":
            self.master = torch.nn.Parameter(weights.to(home, torch.float32, copy=True).contiguous())
        elif weights.dtype != torch.bfloat16:
            raise ConfigError(f"optimizer.precision: {precision} is not for {name} of {weights.dtype}; take masters")

    def add(self, grad: Tensor) -> None:
        """Add a micro-batch's gradient. The first of a step is moved or copied in, so nothing has to be zeroed.

        The sum is contiguous, whatever the gradient is: fused kernels read flat memory.
        """
        if self.started:
            assert self.buffer is not None
            self.buffer.add_(grad)
        elif self.keeps:
            self.buffer = grad.contiguous()
        elif self.buffer is None:
            self.buffer = torch.empty(grad.shape, dtype=torch.float32, device=grad.device).copy_(grad)
        else:
            self.buffer.copy_(grad)
        self.started = True

    @property
    def gradient(self) -> Tensor:
        """Of the step so far; only where there is one."""
        assert self.buffer is not None
        return self.buffer

    def forget(self) -> None:
        """Drop the gradient. A float32 one of a narrow weight stays as a buffer: old pages cost less than fresh ones.

        One that was kept as it came is let go: backward makes another in any case, so a buffer would save nothing.
        """
        self.started = False
        if self.keeps:
            self.buffer = None

    def pieces(self, size: int = 0, *, clip: float = 1.0) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Flat float32 values to be updated in place, their float32 gradient times ``clip``, and where they are.

        Pieces as of ``kept``. Each is written when the next is asked for. Of a weight without master and of a narrow
        gradient only a piece is float32 at any time. The gradient is to be taken once: a float32 one is scaled where
        it is.
        """
        for kept, grad, at in self.kept(size):
            value, grad = kept.float(), grad.float()  # themselves if they are float32
            yield value, grad if clip == 1.0 else grad.mul_(clip), at
            if self.master is None:
                from tandem.optimizers import _narrow  # which needs torch

                _narrow.write_stochastically(kept, value, *self.keys(at))

    def kept(self, size: int = 0) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Flat values as they are kept, to be updated in place, their gradient, and where they are.

        Of ``size`` elements: a multiple of ``PIECE``, which it is by default, or all of them. A part of a parameter is
        cut where the whole would be.
        """
        source = (self.parameter if self.master is None else self.master).detach()
        flat = source.reshape(-1)  # a copy where the weight is strided
        for at in self._cuts(flat.numel(), size or PIECE):
            yield flat[at], self.gradient.view(-1)[at], at
        if not source.is_contiguous():
            source.copy_(flat.view_as(source))
        if not self.own and self.master is not None:
            self.parameter.copy_(self.master)

    def _cuts(self, num: int, size: int) -> Iterator[slice]:
        """Runs of at most ``size`` elements that end at multiples of it, counted in the whole parameter."""
        start = 0
        while start < num:
            stop = min(start + size - (self.part.start + start) % size, num)
            yield slice(start, stop)
            start = stop

    def keys(self, at: slice) -> tuple[list[int], int]:
        """Keys of the random stream for a run of elements, and the first one's place in its ``PIECE``."""
        from tandem.optimizers._narrow import stream

        begins = self.part.start + at.start
        starts = range(begins - begins % PIECE, self.part.start + at.stop, PIECE)
        return [stream(self.steps, self.part.name, start) for start in starts], begins % PIECE

    def held(self) -> dict[str, Tensor]:
        """The state that keeps the weight precise, such as a float32 master."""
        return {} if self.own or self.master is None else {"master": self.master.detach()}


class PreciseStepper(ABC):
    """A ``Stepper`` but for the update rule itself; ``options`` are the optimizer's."""

    def __init__(self, options: Any, weights: Iterable[TrainedWeight]):
        self._options = options
        self.weights = list(weights)
        self._weight_of = {weight.parameter: weight for weight in self.weights}
        # Made now, not at the first step, so that what does not fit fails now.
        self.states: dict[TrainedWeight, dict[str, Tensor]] = {weight: self.fresh(weight) for weight in self.weights}

    @abstractmethod
    def fresh(self, weight: TrainedWeight) -> dict[str, Tensor]:
        """States of a parameter before its first step; ``step`` counts its updates and is ``update``'s to raise."""

    @abstractmethod
    def update(self, weights: Sequence[TrainedWeight], lr: float, clip: float) -> None:
        """Update and write the weights by their gradients times ``clip``."""

    def accumulate(self, parameter: Parameter) -> None:
        """Add ``parameter.grad`` to the step's gradient and set it to None; a post-accumulate hook."""
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
            parameter.grad = None

    def add(self, parameter: Parameter, grad: Tensor) -> None:
        """Add a gradient to the step's."""
        self._weight_of[parameter].add(grad)

    def gradients(self) -> Mapping[Parameter, Tensor]:
        """The gradient so far of each parameter that has one; waits for those on their way."""
        return {weight.parameter: weight.gradient for weight in self.weights if weight.started}

    def forget(self, parameter: Parameter) -> None:
        """Drop a parameter's gradient."""
        self._weight_of[parameter].forget()

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Clip, update, write the weights in place and forget the gradient; returns the norm before clipping.

        A norm that is not finite is returned with nothing updated: weights and states stay as they were.
        """
        norm = torch.zeros((), dtype=torch.float64)
        if gradients := self.gradients():
            norm = global_norm(list(gradients.values()))
        self.update_by(norm, lr, max_grad_norm)
        return norm

    def update_by(self, norm: Tensor, lr: float, max_grad_norm: float) -> None:
        """The same by a norm that was computed already, such as that over all ranks."""
        if weights := [weight for weight in self.weights if weight.started]:
            with torch.no_grad():
                self.clipped_update(weights, norm, lr, max_grad_norm)
        self.zero_grad()

    def clipped_update(self, weights: Sequence[TrainedWeight], norm: Tensor, lr: float, max_grad_norm: float) -> None:
        """Update by gradients of this norm, unless it is not finite.

        Waits for the norm: a skipped update must not be counted, and the host needs the count.
        """
        size = float(norm)
        if math.isfinite(size):
            for weight in weights:
                weight.steps += 1
            self.update(weights, lr, max_grad_norm / size if 0.0 < max_grad_norm < size else 1.0)

    def zero_grad(self) -> None:
        """Forget the gradient of an unfinished step, and those still on the parameters."""
        for weight in self.weights:
            weight.parameter.grad = None
            weight.forget()

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, not copies, as ``<parameter>/<state>``."""
        return {
            f"{weight.part.label}/{key}": value
            for weight in self.weights
            for key, value in {**self.states[weight], **weight.held()}.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy what ``state_dict`` gave into this optimizer's own tensors. Weights are not touched.

        Raises:
            CheckpointError: it is the state of other parameters, or of another optimizer.
        """
        current = self.state_dict()
        wrong = sorted(current.keys() ^ state.keys()) or [n for n, t in current.items() if t.shape != state[n].shape]
        if wrong:
            what = f"the optimizer state is of other parameters: {len(wrong)} entries differ, first {wrong[0]!r}"
            raise CheckpointError(f"{what}; resume with the recipe that the checkpoint was made with")
        with torch.no_grad():
            for name, tensor in current.items():
                tensor.copy_(state[name])
        for weight in self.weights:
            weight.steps = int(self.states[weight]["step"])

    def elementwise_state(self) -> dict[str, Any]:
        """The same as ``state_dict``: every element has its own."""
        return self.state_dict()

    def load_elementwise_state(self, state: dict[str, Any]) -> None:
        """The same as ``load_state_dict``."""
        self.load_state_dict(state)
