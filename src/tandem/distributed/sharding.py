"""Sharded optimizer: gradients are reduce-scattered, each rank updates its part, weights are gathered in place.

Every rank holds whole weights and 1/N of the optimizer's states. The sums of gradients, their norm, the clip factor and
the decision to skip a step are the same on all ranks.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.distributed.gradient_sums import GradientSums, LocalSums, ParameterCut
from tandem.distributed.group import DataGroup
from tandem.distributed.state_shards import Box, StateShare, matrix_shape, run_boxes
from tandem.optimizers.base import BLOCK, ParameterPart, UpdatesParts, global_norm

SMALL = 65_536
"""Parameters of fewer elements are updated whole by every rank: to send their parts would cost more."""


class ShardedStepper:
    """A ``Stepper`` of which each rank of a group has one. What it calls of the group, all ranks call in this order.

    Args:
        optimizer: updates parts.
        named_parameters: what is trained, the same on every rank.
        group: the ranks.
        replicate: every rank updates everything, as for an adapter, which is small; gradients are summed all the same.
        stand_in: takes part in the others' micro-batch where this rank had none, as an adapter of cut weights needs.
        updated: called after each update, on all ranks.
        local: each rank adds up its own micro-batches, and ranks sum once a pass, instead of after each.
    """

    def __init__(
        self,
        optimizer: UpdatesParts,
        named_parameters: Sequence[tuple[str, Parameter]],
        group: DataGroup,
        *,
        replicate: bool = False,
        stand_in: Callable[[], None] = lambda: None,
        updated: Callable[[], None] = lambda: None,
        local: bool = False,
    ):
        self._stand_in, self._updated = stand_in, updated
        self._group = group
        self._named = list(named_parameters)
        self._cuts = [self._cut(name, parameter, replicate=replicate) for name, parameter in self._named]
        self._index = {cut.parameter: i for i, cut in enumerate(self._cuts)}
        self._inner = optimizer.bind_parts([part for cut in self._cuts for part in cut.parts])
        widest = functools.reduce(torch.promote_types, (p.dtype for _, p in self._named), torch.float32)
        kind = LocalSums if local else GradientSums
        self._sums = kind(self._cuts, group, self._inner.add, widest)
        self._started = [False] * len(self._cuts)

    def _cut(self, name: str, parameter: Parameter, *, replicate: bool) -> ParameterCut:
        num, world = parameter.numel(), self._group.world
        # Moments of a part that is very small would be kept in another form than those of the whole.
        width = 0 if replicate or num < max(SMALL, 2 * BLOCK * world) else num // (BLOCK * world) * BLOCK
        if not width:
            all_of_it = ParameterPart(name=name, parameter=parameter)
            return ParameterCut(parameter=parameter, width=0, own=None, rest=all_of_it, shared=0)
        shared, start = width * world, width * self._group.rank
        elements = parameter.detach().view(-1)
        rest = None
        if shared < num:
            rest = ParameterPart(name=name, parameter=Parameter(elements[shared:]), start=shared, of=num)
        run = ParameterPart(name=name, parameter=Parameter(elements[start : start + width]), start=start, of=num)
        return ParameterCut(parameter=parameter, width=width, own=run, rest=rest, shared=shared)

    # Gradients

    def begin_pass(self, num_rounds: int) -> None:
        """Nothing: what is summed when does not depend on how many micro-batches follow."""

    def accumulate(self, parameter: Parameter) -> None:
        """Take ``parameter.grad`` of a micro-batch, which may begin to travel."""
        if parameter.grad is None:
            return
        index = self._index[parameter]
        self._sums.add(index, parameter.grad)
        self._started[index] = True
        parameter.grad = None

    def flush(self) -> None:
        """End a micro-batch, or stand in for one that this rank does not have."""
        self._stand_in()
        self._sums.flush()

    def end_pass(self) -> None:
        """Take all sums of a pass over micro-batches; ``step`` does, where it was not done while the engine sampled."""
        self._sums.end_pass()

    # The update

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Clip, update the own parts, and gather all weights in place; returns the norm over all ranks."""
        self.end_pass()
        self._point()
        device = self._group.device
        started = torch.tensor(self._started, dtype=torch.uint8, device=device)
        self._group.finish([self._group.all_reduce(started, largest=True)], "which gradients there are")
        for cut, is_started in zip(self._cuts, started.tolist(), strict=True):
            if not is_started:
                for part in cut.parts:
                    self._inner.forget(part.parameter)
        norm = self._norm(self._inner.gradients())
        self._inner.update_by(norm, lr, max_grad_norm)
        self.zero_grad()
        self._group.all_gather([cut.parameter.view(-1)[: cut.shared] for cut in self._cuts if cut.width])
        self._updated()
        return norm

    def _norm(self, gradients: Mapping[Parameter, Tensor]) -> Tensor:
        """Over the parts of all ranks, and once over what every rank has."""
        runs = {cut.own.parameter for cut in self._cuts if cut.own is not None}
        of_runs = [gradient for parameter, gradient in gradients.items() if parameter in runs]
        same = [gradient for parameter, gradient in gradients.items() if parameter not in runs]
        home = next(iter(gradients.values())).device if gradients else self._group.device
        square = global_norm(of_runs).square() if of_runs else torch.zeros((), dtype=torch.float64)
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
        self._sums.forget()
        for cut in self._cuts:
            cut.parameter.grad = None

    # States

    def state_dict(self) -> dict[str, Any]:
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
            parts = cut.parts
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self._inner.load_state_dict(state)
