"""Sharded optimizer: gradients are reduce-scattered, each rank updates its part, weights are gathered in place.

Every rank holds whole weights and 1/N of the optimizer's states. Gradients are summed in float32 over ranks, in buckets
whose order never depends on the data: a parameter that has no gradient on a rank counts as zeros there. The sums,
their norm, the clip factor and the decision to skip a step are the same on all ranks.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.distributed.group import DataGroup
from tandem.distributed.state_shards import Box, StateShare, matrix_shape, other_states, run_boxes
from tandem.optimizers.base import BLOCK, ParameterPart, UpdatesParts, global_norm

SMALL = 65_536
"""Parameters of fewer elements are updated whole by every rank: to send their parts would cost more."""
BUCKET = 1 << 24
"""Elements of gradient that are summed by one call."""
IN_FLIGHT = 2
"""Buckets on the wire at once; more would hold memory and hide no more of it."""


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


class ShardedStepper:
    """A ``Stepper`` of which each rank of a group has one. What it calls of the group, all ranks call in this order.

    Args:
        optimizer: updates parts.
        named_parameters: what is trained, the same on every rank.
        group: the ranks.
        replicate: every rank updates everything, as for an adapter, which is small; gradients are summed all the same.
        smallest: elements of a parameter that is divided; None: ``SMALL``.
        bucket: elements of gradient that are summed by one call; None: ``BUCKET``.
    """

    def __init__(
        self,
        optimizer: UpdatesParts,
        named_parameters: Sequence[tuple[str, Parameter]],
        group: DataGroup,
        *,
        replicate: bool = False,
        smallest: int | None = None,
        bucket: int | None = None,
    ):
        self._group = group
        self._smallest = SMALL if smallest is None else smallest
        self._named = list(named_parameters)
        self._cuts = [self._cut(name, parameter, replicate=replicate) for name, parameter in self._named]
        self._index = {cut.parameter: i for i, cut in enumerate(self._cuts)}
        self._inner = optimizer.bind_parts([part for cut in self._cuts for part in _parts(cut)])
        widest = functools.reduce(torch.promote_types, (p.dtype for _, p in self._named), torch.float32)
        self._sum_type = widest
        self._buckets = list(_buckets(self._cuts, group.world, BUCKET if bucket is None else bucket))
        self._last = {index: i for i, bucket in enumerate(self._buckets) for index in bucket.last_of}
        self._arrived: dict[int, Tensor] = {}
        self._launched = 0
        self._flying: deque[BucketOnTheWire] = deque()
        self._landed: dict[int, list[Tensor]] = {}
        self._started = [False] * len(self._cuts)

    def _cut(self, name: str, parameter: Parameter, *, replicate: bool) -> ParameterCut:
        num, world = parameter.numel(), self._group.world
        # Moments of a part that is very small would be kept in another form than those of the whole.
        width = 0 if replicate or num < max(self._smallest, 2 * BLOCK * world) else num // (BLOCK * world) * BLOCK
        if not width:
            all_of_it = ParameterPart(name=name, parameter=parameter)
            return ParameterCut(parameter=parameter, width=0, own=None, rest=all_of_it, shared=0)
        shared, own = width * world, width * self._group.rank
        elements = parameter.detach().view(-1)
        rest = None
        if shared < num:
            rest = ParameterPart(name=name, parameter=Parameter(elements[shared:]), start=shared, of=num)
        mine = ParameterPart(name=name, parameter=Parameter(elements[own : own + width]), start=own, of=num)
        return ParameterCut(parameter=parameter, width=width, own=mine, rest=rest, shared=shared)

    # Gradients

    def accumulate(self, parameter: Parameter) -> None:
        """Take ``parameter.grad`` of a micro-batch; a bucket that is complete, and those before it, begin to travel."""
        if parameter.grad is None:
            return
        index = self._index[parameter]
        if index in self._arrived or self._last[index] < self._launched:
            name = self._named[index][0]
            raise RuntimeError(f"backward made a second gradient of {name} in one micro-batch; ranks could not agree")
        self._arrived[index] = parameter.grad
        self._started[index] = True
        parameter.grad = None
        while self._launched < len(self._buckets) and self._arrived.keys() >= self._buckets[self._launched].cuts:
            self._launch()

    def flush(self) -> None:
        """End a micro-batch, or stand in for one that this rank does not have: send what is left, and take the sums."""
        while self._launched < len(self._buckets):
            self._launch()
        self._receive(0)
        self._launched = 0
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
                    self._inner.add(cut.own.parameter, landed[0] if len(landed) == 1 else torch.cat(landed))
            at = 0
            for run in flight.bucket.rests:
                rest = self._cuts[run.cut].rest
                assert rest is not None
                part = flight.rests[at : (at := at + run.stop - run.start)]
                self._inner.add(rest.parameter, part.view(rest.parameter.shape))

    # The update

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Clip, update the own parts, and gather all weights in place; returns the norm over all ranks."""
        self._point()
        device = self._group.device
        started = torch.tensor(self._started, dtype=torch.uint8, device=device)
        self._group.finish([self._group.all_reduce(started, largest=True)], "which gradients there are")
        for cut, is_started in zip(self._cuts, started.tolist(), strict=True):
            if not is_started:
                for part in _parts(cut):
                    self._inner.forget(part.parameter)
        norm = self._norm(self._inner.gradients())
        self._inner.update_by(norm, lr, max_grad_norm)
        self.zero_grad()
        self._group.all_gather([cut.parameter.view(-1)[: cut.shared] for cut in self._cuts if cut.width])
        return norm

    def _norm(self, gradients: Mapping[Parameter, Tensor]) -> Tensor:
        """Over the parts of all ranks, and once over what every rank has."""
        own = {cut.own.parameter for cut in self._cuts if cut.own is not None}
        mine = [gradient for parameter, gradient in gradients.items() if parameter in own]
        same = [gradient for parameter, gradient in gradients.items() if parameter not in own]
        home = next(iter(gradients.values())).device if gradients else self._group.device
        square = global_norm(mine).square() if mine else torch.zeros((), dtype=torch.float64)
        square = square.to(self._group.device)
        self._group.finish([self._group.all_reduce(square)], "the gradient's norm")
        square = square.to(home)
        return (square + global_norm(same).square() if same else square).sqrt()

    def _point(self) -> None:
        """Have parts lie where their parameters are now: these may have moved into an engine's memory."""
        for cut in self._cuts:
            if cut.own is not None:
                elements = cut.parameter.detach().view(-1)
                cut.own.parameter.data = elements[cut.own.start : cut.own.start + cut.width]
                if cut.rest is not None:
                    cut.rest.parameter.data = elements[cut.shared :]

    def zero_grad(self) -> None:
        """Forget the gradients of an unfinished step."""
        self._inner.zero_grad()
        self._started = [False] * len(self._cuts)
        self._arrived.clear()
        for cut in self._cuts:
            cut.parameter.grad = None

    # States

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The states of whole parameters, as one process would have them; all ranks call this together.

        Rank 0 has them in host memory, one tensor after another; the others get nothing.
        """
        inner: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in self._inner.state_dict().items():
            label, _, kind = key.rpartition("/")
            inner[label][kind] = value
        out: dict[str, Any] = {}
        for (name, parameter), cut in zip(self._named, self._cuts, strict=True):
            if cut.own is None:
                out |= {f"{name}/{kind}": value for kind, value in inner[name].items()}
                continue
            for kind, mine in inner[cut.own.label].items():
                rest = None if cut.rest is None else inner[cut.rest.label][kind]
                whole = self._whole(mine, rest) if mine.dim() else mine
                if whole.numel() == parameter.numel() and not kind.endswith(".codes"):
                    whole = whole.view(parameter.shape)
                if self._group.rank == 0:
                    out[f"{name}/{kind}"] = whole.cpu()
        return out if self._group.rank == 0 else {}

    def _whole(self, mine: Tensor, rest: Tensor | None) -> Tensor:
        """A state of a whole parameter, of the parts of all ranks and the rest."""
        gathered = torch.empty(len(mine) * self._group.world, dtype=mine.dtype, device=self._group.device)
        gathered.chunk(self._group.world)[self._group.rank].copy_(mine)
        self._group.all_gather([gathered])
        return gathered if rest is None else torch.cat([gathered, rest.to(gathered.device)])

    def local_states(self) -> dict[str, Tensor]:
        """States of this rank's parts, and of what every rank updates; live tensors."""
        return self._inner.state_dict()

    def shares(self, states: Mapping[str, Tensor]) -> list[StateShare]:
        """Where in whole states those of this rank's parts have their place; ranks take turns at what all have."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for key in states:
            label, _, kind = key.rpartition("/")
            kinds[label].append(kind)
        shares = []
        for index, ((name, parameter), cut) in enumerate(zip(self._named, self._cuts, strict=True)):
            is_mine = index % self._group.world == self._group.rank
            parts = _parts(cut)
            for kind in kinds[parts[0].label]:
                per = BLOCK if kind.endswith(".scales") else 1
                shape = states[f"{parts[0].label}/{kind}"].shape
                if is_divided := cut.own is not None and len(shape) > 0:
                    is_flat = per > 1 or kind.endswith(".codes")
                    shape = torch.Size([-(-parameter.numel() // per)]) if is_flat else parameter.shape
                boxes: list[Box] = []
                for part in parts:
                    state, start = states[f"{part.label}/{kind}"], part.start // per if is_divided else 0
                    writes = is_mine and not boxes if not is_divided else is_mine or part is cut.own
                    boxes += run_boxes(state, start, matrix_shape(shape), is_written=writes)
                shares.append(StateShare(name=f"{name}/{kind}", shape=matrix_shape(shape), boxes=tuple(boxes)))
        return shares

    def load_local_states(self, states: Mapping[str, Tensor]) -> None:
        """Take over what ``local_states`` gave."""
        self._inner.load_state_dict(dict(states))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the own parts of what ``state_dict`` gave, with any number of ranks.

        Raises:
            CheckpointError: it is the state of other parameters, or of another optimizer.
        """
        sizes = {name: parameter.numel() for name, parameter in self._named}
        parts = {part.label: part for cut in self._cuts for part in _parts(cut)}
        own: dict[str, Any] = {}
        taken: set[str] = set()
        for key, mine in self._inner.state_dict().items():
            label, _, kind = key.rpartition("/")
            part = parts[label]
            taken.add(name := f"{part.name}/{kind}")
            whole = state.get(name)
            per = BLOCK if kind.endswith(".scales") else 1
            if whole is None or (mine.dim() and whole.numel() != -(-sizes[part.name] // per)):
                raise other_states(name)
            if part.of is None or not mine.dim():
                own[key] = whole
            else:
                own[key] = whole.reshape(-1)[part.start // per :][: len(mine)]
        if left := sorted(state.keys() - taken):
            raise other_states(left[0])
        self._inner.load_state_dict(own)


def _parts(cut: ParameterCut) -> list[ParameterPart]:
    return [part for part in (cut.own, cut.rest) if part is not None]


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
