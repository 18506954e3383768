"""What a recipe's optimizer does to bfloat16 weights by updates that are smaller than their last bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.nn import Parameter

from tandem.optimizers.base import Optimizer
from tandem.tools.certify import optimizers
from tandem.tools.certify.formula import Options
from tandem.tools.certify.line import Line, judged
from tandem.tools.certify.optimizers import Update

NAME = "bfloat16 weights"

UPDATES = 16
"""How many are made."""
MICRO = 2
"""Micro-batches of each."""
STEP = 2.0**-10
"""How far an update moves weights, as a share of them: a quarter or an eighth of their last bit."""
NUMBERS = 1 << 18
"""Numbers that are looked at, at most, whole weights of them."""
LOST = 0.1
"""Largest share of the way that may be missing: it ends within half of a last bit, which weights began on."""


def line(
    optimizer: Optimizer, known: tuple[str, Options], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> Line:
    """How much of the way by the formula the weights went.

    Args:
        optimizer: the recipe's.
        known: its kind and options, as plain data.
        weights: what is trained, by name.
        gradients: of these.
    """
    parameters = {name: Parameter(weights[name].bfloat16()) for name in _some(weights)}
    begin = {name: parameter.detach().double() for name, parameter in parameters.items()}
    grads = {name: (gradients[name] / MICRO).bfloat16() for name in parameters}
    typical = optimizers.size(begin) / math.sqrt(sum(weight.numel() for weight in begin.values()))
    lr = STEP * (1.0 if known[0] in optimizers.RELATIVE else typical)
    steady = dataclasses.replace(optimizer, lr=lr, warmup_steps=0, schedule="constant")
    stepper = steady.bind(list(parameters.items()))
    for _ in range(UPDATES):
        for _ in range(MICRO):
            for name, parameter in parameters.items():
                parameter.grad = grads[name].clone()
                stepper.accumulate(parameter)
        stepper.step(lr, steady.max_grad_norm)
    exact = dict(begin)

    def coming() -> Iterator[Update]:
        for step in range(1, UPDATES + 1):
            whole = {name: grad.double() * MICRO for name, grad in grads.items()}
            yield Update(step=step, gradients=whole, before=dict(exact), after={}, norm=0.0)

    plain = {**known[1], "lr": lr, "warmup_steps": 0, "schedule": "constant"}
    for move in optimizers.moves((known[0], plain), coming(), UPDATES):
        for name in exact:
            exact[name] = exact[name] + move[name]
    way = {name: exact[name] - begin[name] for name in begin}
    went = math.fsum(float(((p.detach().double() - begin[n]) * way[n]).sum()) for n, p in parameters.items())
    share = went / (optimizers.size(way) ** 2 or 1.0)
    return judged(NAME, [abs(share - 1)], LOST, "float64 formula", f"{UPDATES} updates of part of their last bit")


def _some(weights: Mapping[str, Tensor]) -> list[str]:
    """The first of them that are not too many, the first in any case."""
    found, numbers = list[str](), 0
    for name, weight in weights.items():
        numbers += weight.numel()
        if found and numbers > NUMBERS:
            break
        found.append(name)
    return found
