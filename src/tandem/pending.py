"""Pending metrics: numbers that a device is still computing, and the one place where the host waits for them.

To ask a device for one number makes the host wait until the device is done with everything before it, and then the
device wait for the host. So what measures something on a device says what is to become of the numbers and goes on;
``settle`` brings all of them over in one copy when a whole pass has been queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tandem.lazy import Tensor, torch
from tandem.metrics import Value


class Pending:
    """A metric whose numbers are on a device: ``Pending(Mean, total, n)`` becomes ``Mean(total, n)``.

    Args:
        kind: makes the value of plain numbers.
        numbers: its arguments; a Tensor has one element, and is held without its graph.
    """

    __slots__ = ("kind", "numbers")

    def __init__(self, kind: Callable[..., Value], *numbers: Tensor | float):
        self.kind = kind
        self.numbers = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in numbers)


PendingMetrics = Mapping[str, Value | Pending]
"""Metrics by name, of which some may be on a device."""


def settle(
    parts: Sequence[PendingMetrics], tensors: Sequence[Tensor] = ()
) -> tuple[list[dict[str, Value]], list[list[float]]]:
    """Plain values in place of pending ones, and the numbers of other tensors; waits for the device once."""
    pending = [value for part in parts for value in part.values() if isinstance(value, Pending)]
    deferred = [x for value in pending for x in value.numbers if isinstance(x, torch.Tensor)]
    numbers = fetch([*tensors, *deferred])
    rest = iter(numbers[len(tensors) :])

    def plain(value: Value | Pending) -> Value:
        if not isinstance(value, Pending):
            return value
        return value.kind(*(next(rest)[0] if isinstance(x, torch.Tensor) else x for x in value.numbers))

    # Both walks are in the order of the mappings.
    return [{name: plain(value) for name, value in part.items()} for part in parts], numbers[: len(tensors)]


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Every tensor's elements, flat, by one copy from each device."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(i)
    on: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
    for (device, _), which in alike.items():
        # Joined by type first: one kernel widens many tensors. A float64 holds float32 and counts exactly.
        joined = torch.cat([tensors[i].detach().reshape(-1) for i in which]).double()
        on.setdefault(device, []).append((which, joined))
    out: list[list[float]] = [[] for _ in tensors]
    for groups in on.values():
        numbers, at = torch.cat([joined for _, joined in groups]).tolist(), 0
        for which, _ in groups:
            for i in which:
                out[i] = numbers[at : at + tensors[i].numel()]
                at += tensors[i].numel()
    return out
