"""AdamW with its states in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from tandem.lazy import Parameter, Tensor, torch
from tandem.optimizers._adam import Adam, FloatMoments
from tandem.optimizers._precise import FLOAT, TrainedWeight
from tandem.optimizers.base import ParameterPart, PartStepper

_IN_FLIGHT = 4  # gradients on their way; more would hold memory and hide no more of it


@dataclass(frozen=True, kw_only=True)
class AdamWCpu(Adam):
    """AdamW in float32 with masters, moments and gradients in host memory; the weights stay on their device.

    A model of 7 billion bfloat16 weights then takes 14 GB of an accelerator instead of 126, and its step takes seconds:
    the host reads and writes 30 bytes for each weight.
    """

    states_on: ClassVar[Literal["weights", "host"]] = "host"

    def bind_parts(self, parts: Sequence[ParameterPart]) -> PartStepper:
        """Copy masters to the host and allocate moments there."""
        host = torch.device("cpu")
        return _HostMoments(self, [TrainedWeight(part, "masters", host) for part in parts])

    def state_bytes(self, num_parameters: int, parameter_bytes: int) -> int:
        """Two moments, the gradient and the master, whatever the weights are."""
        return num_parameters * FLOAT * 4


class _HostMoments(FloatMoments):
    """AdamWCpu bound to parameters."""

    def __init__(self, options: AdamWCpu, weights: Sequence[TrainedWeight]):
        super().__init__(options, weights)
        self._arriving: deque[tuple[TrainedWeight, Tensor, torch.cuda.Event]] = deque()

    def add(self, parameter: Parameter, grad: Tensor) -> None:
        """Send the gradient to the host; it is added there while the next ones are computed."""
        if not grad.is_cuda:
            super().add(parameter, grad)
            return
        landing = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
        landing.copy_(grad, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(grad.device))
        self._arriving.append((self._weight_of[parameter], landing, arrived))
        self._receive(_IN_FLIGHT)

    def _receive(self, leave: int) -> None:
        """Add up arrived gradients in the order they were sent, until so many are left."""
        while len(self._arriving) > leave:
            weight, landing, arrived = self._arriving.popleft()
            arrived.synchronize()
            weight.add(landing)

    def gradients(self) -> Mapping[Parameter, Tensor]:
        """The gradient so far of each parameter that has one, once all have arrived."""
        self._receive(0)
        return super().gradients()

    def zero_grad(self) -> None:
        """Forget the gradient, also what has not arrived."""
        self._arriving.clear()
        super().zero_grad()

    def write(self, weights: Sequence[TrainedWeight]) -> None:
        """Round masters on the host, then send them: half as many bytes travel."""
        for weight in weights:
            assert weight.master is not None
            if weight.parameter.is_cuda:
                leaving = torch.empty(weight.master.shape, dtype=weight.parameter.dtype, pin_memory=True)
                weight.parameter.copy_(leaving.copy_(weight.master.detach()), non_blocking=True)
            else:
                weight.parameter.copy_(weight.master)
