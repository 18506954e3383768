"""Sums of gradients over ranks: of each micro-batch while backward goes on, or of what each rank has added up.

Each element's sum is float32 (float64 for weights of that type) and reaches the rank that updates the element. The
order of collectives never depends on the data: a parameter without a gradient on a rank counts as zeros there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.distributed.group import DataGroup
from tandem.optimizers.base import ParameterPart

BUCKET = 1 << 24
"""Elements of gradient that are summed by one call."""
IN_FLIGHT = 2
"""Calls on the wire at once; more would hold memory and hide no more of it."""
Deliver = Callable[[Parameter, Tensor], None]
"""Takes the sum of a part's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCut:
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


class GradientSums(Protocol):
    """How the gradients of a step become sums over ranks. All ranks call everything but ``add`` together."""

    def add(self, index: int, grad: Tensor) -> None:
        """Take the gradient of a cut's parameter, of one micro-batch, which is the caller's no more."""
        ...

    def flush(self) -> None:
        """End a micro-batch, or stand in for one that this rank does not have."""
        ...

    def end_pass(self) -> None:
        """Deliver what is left once the last micro-batch of a pass was flushed; again before another, nothing."""
        ...

    def forget(self) -> None:
        """Drop what was taken of an unfinished step."""
        ...


def _second_gradient(index: int, cuts: Sequence[ParameterCut]) -> RuntimeError:
    name = cuts[index].parts[0].name
    return RuntimeError(f"backward made a second gradient of {name} in one micro-batch; ranks could not agree")


class LocalSums:
    """Each rank adds up its own micro-batches, and ranks sum once a pass: 4 bytes a weight more on every rank.

    Args:
        cuts: how parameters are divided, alike on all ranks.
        group: the ranks.
        deliver: takes the sum of a part.
        dtype: of sums.
    """

    def __init__(self, cuts: Sequence[ParameterCut], group: DataGroup, deliver: Deliver, dtype: torch.dtype):
        self._cuts, self._group, self._deliver, self._dtype = cuts, group, deliver, dtype
        self._totals: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        self._is_open = False

    def add(self, index: int, grad: Tensor) -> None:
        """Add it to this rank's own; the first of a step is kept, or widened."""
        if index in self._taken:
            raise _second_gradient(index, self._cuts)
        self._taken.add(index)
        if (total := self._totals.get(index)) is None:
            self._totals[index] = grad.reshape(-1).to(self._dtype)
        else:
            total.add_(grad.reshape(-1))

    def flush(self) -> None:
        """Nothing travels before the pass ends."""
        self._taken.clear()
        self._is_open = True

    def end_pass(self) -> None:
        """Scatter the sums of runs, a parameter at a time, and reduce all that every rank updates at once."""
        if not self._is_open:
            return
        self._is_open = False
        flying: deque[tuple[Any, Parameter, Tensor, Tensor]] = deque()
        rests: list[tuple[ParameterPart, Tensor]] = []

        def land(leave: int) -> None:
            while len(flying) > leave:
                work, parameter, own, _ = flying.popleft()
                self._group.finish([work], "sums of gradients")
                self._deliver(parameter, own)

        for index in range(len(self._cuts) - 1, -1, -1):
            cut = self._cuts[index]
            total = self._totals.pop(index, None)
            if total is None:
                total = torch.zeros(cut.parameter.numel(), dtype=self._dtype, device=cut.parameter.device)
            if cut.rest is not None:
                rests.append((cut.rest, total[cut.shared :]))
            if cut.own is not None:
                own = torch.empty(cut.width, dtype=self._dtype, device=total.device)
                rows = total[: cut.shared].view(self._group.world, cut.width)
                flying.append((self._group.reduce_scatter(own, rows), cut.own.parameter, own, rows))
                land(IN_FLIGHT)
        land(0)
        self._reduce_rests(rests)

    def _reduce_rests(self, rests: Sequence[tuple[ParameterPart, Tensor]]) -> None:
        """One call: most are norms and biases of a few thousand elements."""
        if not rests:
            return
        joined = torch.cat([rest for _, rest in rests])
        self._group.finish([self._group.all_reduce(joined)], "sums of small gradients")
        totals = joined.split([len(rest) for _, rest in rests])
        for part, total in zip([part for part, _ in rests], totals, strict=True):
            self._deliver(part.parameter, total.view(part.parameter.shape))

    def forget(self) -> None:
        """Drop this rank's own sums."""
        self._totals.clear()
        self._taken.clear()
        self._is_open = False


class ElementRange(NamedTuple):
    """Elements of a parameter's gradient in one bucket."""

    cut: int
    """Index of the parameter's cut."""
    start: int
    """First element within each rank's run, or within the rest."""
    stop: int
    """The one after the last."""


@dataclass(slots=True)
class GradientBucket:
    """What is summed by one call of each kind."""

    runs: list[ElementRange]
    """Of every rank's part."""
    rests: list[ElementRange]
    """Of what every rank updates."""
    last_of: list[int]
    """Cuts of which nothing is in later buckets."""

    @property
    def cuts(self) -> set[int]:
        """Cuts that have elements in it."""
        return {run.cut for run in (*self.runs, *self.rests)}


class BucketOnTheWire(NamedTuple):
    """A bucket on the wire."""

    bucket: GradientBucket
    works: list[Any]
    own: Tensor
    rests: Tensor
    rows: Tensor


class ScatteredSums:
    """Each micro-batch's gradients are summed and scattered while backward goes on: no rank keeps all of them.

    Args:
        cuts: how parameters are divided, alike on all ranks.
        group: the ranks.
        deliver: takes the sum of a part, of one round of micro-batches.
        dtype: of sums.
        bucket: elements of gradient that are summed by one call.
    """

    def __init__(
        self, cuts: Sequence[ParameterCut], group: DataGroup, deliver: Deliver, dtype: torch.dtype, bucket: int
    ):
        self._cuts, self._group, self._deliver, self._sum_type = cuts, group, deliver, dtype
        self._buckets = list(_buckets(cuts, group.world, bucket))
        self._last = {index: i for i, bucket in enumerate(self._buckets) for index in bucket.last_of}
        self._arrived: dict[int, Tensor] = {}
        self._launched = 0
        self._flying: deque[BucketOnTheWire] = deque()
        self._landed: dict[int, list[Tensor]] = {}

    def add(self, index: int, grad: Tensor) -> None:
        """Take it; a bucket that is complete, and those before it, begin to travel."""
        if index in self._arrived or self._last[index] < self._launched:
            raise _second_gradient(index, self._cuts)
        self._arrived[index] = grad
        while self._launched < len(self._buckets) and self._arrived.keys() >= self._buckets[self._launched].cuts:
            self._launch()

    def flush(self) -> None:
        """Send what is left of a micro-batch, and take the sums."""
        while self._launched < len(self._buckets):
            self._launch()
        self._receive(0)
        self._launched = 0
        self._arrived.clear()

    def end_pass(self) -> None:
        """Nothing: the last micro-batch was flushed."""

    def forget(self) -> None:
        """Drop what has not travelled."""
        self._arrived.clear()

    def _launch(self) -> None:
        """Send the next bucket."""
        bucket = self._buckets[self._launched]
        self._launched += 1
        width, rest = (sum(run.stop - run.start for run in runs) for runs in (bucket.runs, bucket.rests))
        device = self._cuts[0].parameter.device
        rows = torch.empty((self._group.world, width), dtype=self._sum_type, device=device)
        rests = torch.empty(rest, dtype=self._sum_type, device=device)
        own = torch.empty(width, dtype=self._sum_type, device=device)
        at = 0
        for run in bucket.runs:
            place = rows[:, at : (at := at + run.stop - run.start)]
            grad, cut = self._arrived.get(run.cut), self._cuts[run.cut]
            if grad is None:
                place.zero_()
            else:
                shared = grad.reshape(-1)[: cut.shared].view(self._group.world, cut.width)
                place.copy_(shared[:, run.start : run.stop])
        at = 0
        for run in bucket.rests:
            place = rests[at : (at := at + run.stop - run.start)]
            grad, cut = self._arrived.get(run.cut), self._cuts[run.cut]
            if grad is None:
                place.zero_()
            else:
                place.copy_(grad.reshape(-1)[cut.shared + run.start : cut.shared + run.stop])
        for index in bucket.last_of:
            self._arrived.pop(index, None)
        works = [self._group.reduce_scatter(own, rows)] if width else []
        works += [self._group.all_reduce(rests)] if rest else []
        self._flying.append(BucketOnTheWire(bucket, works, own, rests, rows))
        self._receive(IN_FLIGHT)

    def _receive(self, leave: int) -> None:
        """Add up sums that have come, until so many buckets are on the wire."""
        while len(self._flying) > leave:
            flight = self._flying.popleft()
            self._group.finish(flight.works, "sums of gradients")
            at = 0
            for run in flight.bucket.runs:
                cut, part = self._cuts[run.cut], flight.own[at : (at := at + run.stop - run.start)]
                assert cut.own is not None
                landed = self._landed.setdefault(run.cut, [])
                landed.append(part)
                if run.stop == cut.width:
                    del self._landed[run.cut]
                    self._deliver(cut.own.parameter, landed[0] if len(landed) == 1 else torch.cat(landed))
            at = 0
            for run in flight.bucket.rests:
                rest = self._cuts[run.cut].rest
                assert rest is not None
                part = flight.rests[at : (at := at + run.stop - run.start)]
                self._deliver(rest.parameter, part.view(rest.parameter.shape))


def _buckets(cuts: Sequence[ParameterCut], world: int, most: int) -> Iterator[GradientBucket]:
    """All elements in reverse order of the parameters, as backward makes their gradients."""
    bucket, size = GradientBucket([], [], []), 0
    for index in range(len(cuts) - 1, -1, -1):
        cut, start = cuts[index], 0
        while start < cut.width:
            room = max(1, (most - size) // world)
            stop = min(start + room, cut.width)
            bucket.runs.append(ElementRange(index, start, stop))
            size += (stop - start) * world
            start = stop
            if size >= most and start < cut.width:
                yield bucket
                bucket, size = GradientBucket([], [], []), 0
        if cut.rest is not None:
            num = cut.rest.parameter.numel()
            bucket.rests.append(ElementRange(index, 0, num))
            size += num
        bucket.last_of.append(index)
        if size >= most:
            yield bucket
            bucket, size = GradientBucket([], [], []), 0
    if bucket.last_of:
        yield bucket
