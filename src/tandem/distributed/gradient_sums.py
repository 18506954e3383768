"""Sums of gradients over ranks: of each micro-batch while backward goes on, or of what each rank has added up.

Each element's sum is float32 (float64 for weights of that type) and reaches the rank that updates the element. The
order of collectives never depends on the data: a parameter without a gradient on a rank counts as zeros there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.distributed.group import DataGroup
from tandem.optimizers.base import ParameterPart

BUCKET = 1 << 24
"""Most elements of a gradient that are summed by one call."""
IN_FLIGHT = 2
"""Calls on the wire at once; more would hold memory and hide no more of it."""
Deliver = Callable[[Parameter, Tensor], None]
"""Takes the sum of a part's gradient."""


class ParameterCut(NamedTuple):
    """How a parameter is divided: equal runs of elements for the ranks, and a rest that every rank updates."""

    parameter: Parameter
    """The whole."""
    width: int
    """Elements of each rank's run, a multiple of ``BLOCK``; 0 if all is rest."""
    own: ParameterPart | None
    """This rank's run."""
    rest: ParameterPart | None
    """What every rank updates."""
    shared: int
    """Elements of all runs together: where the rest begins."""

    @property
    def parts(self) -> list[ParameterPart]:
        """What this rank updates of it."""
        return [part for part in (self.own, self.rest) if part is not None]


class _Call(NamedTuple):
    """A sum of runs on the wire."""

    work: Any
    cut: ParameterCut
    stop: int
    """Of this rank's run, the element after the last one that is summed."""
    run: Tensor
    rows: Tensor


class GradientSums:
    """Each micro-batch's gradients are summed and scattered while backward goes on: no rank keeps all of them.

    They travel in reverse order of the parameters, as backward makes them; one that comes early waits for its turn. All
    ranks call everything but ``add`` together.

    Args:
        cuts: how parameters are divided, alike on all ranks.
        group: the ranks.
        deliver: takes the sum of a part.
        dtype: of sums.
    """

    def __init__(self, cuts: Sequence[ParameterCut], group: DataGroup, deliver: Deliver, dtype: torch.dtype):
        self.cuts, self.dtype = cuts, dtype
        self._group, self._deliver = group, deliver
        self._flying: deque[_Call] = deque()
        self._landed: list[Tensor] = []
        self._rests: list[tuple[ParameterPart, Tensor]] = []
        self._early: dict[int, Tensor] = {}
        self._next = len(cuts) - 1

    def add(self, index: int, grad: Tensor) -> None:
        """Take the gradient of a cut's parameter, of one micro-batch, which is the caller's no more."""
        assert index <= self._next, "backward made a second gradient of a parameter"
        assert index not in self._early, "backward made a second gradient of a parameter"
        self._early[index] = grad
        while self._next in self._early:
            self._send_next()

    def _send_next(self) -> None:
        self.send(self._next, self._early.pop(self._next, None))
        self._next -= 1

    def flush(self) -> None:
        """End a micro-batch, or stand in for one that this rank does not have: send what is left, and take the sums."""
        while self._next >= 0:
            self._send_next()
        self.finish()
        self._next = len(self.cuts) - 1

    def end_pass(self) -> None:
        """Deliver what is left once the last micro-batch of a pass was flushed; again before another, nothing."""

    def forget(self) -> None:
        """Drop what was taken of an unfinished step."""
        self._early.clear()

    def send(self, index: int, grad: Tensor | None) -> None:
        """Begin to sum a parameter's gradient, or zeros; its rest waits for those of the others."""
        cut, world = self.cuts[index], self._group.world
        if grad is None:
            grad = torch.zeros_like(cut.parameter, dtype=self.dtype)
        elements = grad.reshape(-1)
        if cut.rest is not None:
            self._rests.append((cut.rest, elements[cut.shared :].to(self.dtype)))
        each = max(1, BUCKET // world)
        for start in range(0, cut.width, each):
            rows = elements[: cut.shared].view(world, cut.width)[:, start : start + each].to(self.dtype).contiguous()
            run = torch.empty(rows.shape[1], dtype=self.dtype, device=rows.device)
            work = self._group.reduce_scatter(run, rows)
            self._flying.append(_Call(work, cut, start + rows.shape[1], run, rows))
            self._land(IN_FLIGHT)

    def _land(self, leave: int) -> None:
        """Take sums that have come, until so many calls are on the wire."""
        while len(self._flying) > leave:
            call = self._flying.popleft()
            self._group.finish([call.work], "sums of gradients")
            self._landed.append(call.run)
            if call.stop == call.cut.width:
                assert call.cut.own is not None
                self._deliver(call.cut.own.parameter, torch.cat(self._landed) if self._landed[1:] else self._landed[0])
                self._landed.clear()

    def finish(self) -> None:
        """Deliver all sums; the rests by one call, since most are norms and biases of a few thousand elements."""
        self._land(0)
        if not self._rests:
            return
        joined = torch.cat([rest for _, rest in self._rests])
        self._group.finish([self._group.all_reduce(joined)], "sums of small gradients")
        for (part, _), total in zip(self._rests, joined.split([len(rest) for _, rest in self._rests]), strict=True):
            self._deliver(part.parameter, total.view(part.parameter.shape))
        self._rests.clear()


class LocalSums(GradientSums):
    """Each rank adds up its own micro-batches, and ranks sum once a pass: 4 bytes a weight more on every rank."""

    def __init__(self, *options: Any):
        super().__init__(*options)
        self._totals: dict[int, Tensor] = {}
        self._is_open = False

    def add(self, index: int, grad: Tensor) -> None:
        """Add it to this rank's own; the first of a step is kept, or widened."""
        if (total := self._totals.get(index)) is None:
            self._totals[index] = grad.reshape(-1).to(self.dtype)
        else:
            total.add_(grad.reshape(-1))

    def flush(self) -> None:
        """Nothing travels before the pass ends."""
        self._is_open = True

    def end_pass(self) -> None:
        """Sum everything over ranks, a parameter at a time."""
        if self._is_open:
            self._is_open = False
            for index in reversed(range(len(self.cuts))):
                self.send(index, self._totals.pop(index, None))
            self.finish()

    def forget(self) -> None:
        """Drop this rank's own sums."""
        self._totals.clear()
        self._is_open = False
