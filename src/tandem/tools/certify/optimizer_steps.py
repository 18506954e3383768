"""Learning rates, clipping and the shipped optimizers in float64, as their papers have them, against a recipe's own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tandem.metrics import flatten
from tandem.model.policy import Compute, Policy
from tandem.optimizers.base import Optimizer, Stepper
from tandem.tools.certify.certificate import CertificateLine, judged
from tandem.tools.certify.gradients import Gradient, Setup, distance, norm
from tandem.tools.certify.plain import Options
from tandem.trainer.pack import StepBatch
from tandem.trainer.step import Step
from tandem.trainer.work import LocalWork

BLOCK = 256
"""Numbers of an 8-bit moment that share a scale."""
FLOATS = 4096
"""Smaller weights have moments in float32, whatever others have."""
ZERO = 1e-300
"""Stands where a zero is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update that an optimizer made."""

    step: int
    """Of the run, from 1; several updates may be one step's."""
    gradients: Mapping[str, Tensor]
    """Summed over micro-batches, by parameter name."""
    before: Mapping[str, Tensor]
    """The weights."""
    after: Mapping[str, Tensor]
    """The weights."""
    norm: float
    """Of the gradients, as the optimizer told it."""

    @property
    def moved(self) -> dict[str, Tensor]:
        """How far every weight went, float64."""
        return {name: self.after[name].double() - self.before[name].double() for name in self.gradients}


def rate(options: Options, step: int, total: int) -> float:
    """Learning rate of a step of so many: a linear rise, then constant or down along a line or half a cosine."""
    peak, rise = options["lr"], options["warmup_steps"]
    if step <= rise:
        return float(peak * step / rise)
    done = min(1.0, (step - rise) / max(1, total - rise))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[options["schedule"]]
    low = options["min_lr_ratio"]
    return float(peak * (low + (1 - low) * left))


def moves(optimizer: tuple[str, Options], updates: Iterable[Update], total: int) -> Iterator[dict[str, Tensor]]:
    """Change of every weight by each update, float64, given the weights before it.

    Args:
        optimizer: kind and options.
        updates: what is made, in order; states are carried from one to the next.
        total: steps of the run.
    """
    kind, options = optimizer
    states: dict[str, State] = {}
    for count, update in enumerate(updates, 1):
        whole, most = norm([update.gradients]), options["max_grad_norm"]
        clip = most / whole if 0 < most < whole else 1.0
        lr = rate(options, update.step, total)
        by_name = {}
        for name, gradient in update.gradients.items():
            state, before = states.setdefault(name, {}), update.before[name].double()
            by_name[name] = RULES[kind](state, gradient.double() * clip, before, lr, count, options)
        yield by_name


State = dict[str, Tensor]


def _adamw(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    means = []
    for name, power, beta in (("mean", 1, options["beta1"]), ("square", 2, options["beta2"])):
        state[name] = beta * state.get(name, torch.zeros_like(gradient)) + (1 - beta) * gradient**power
        means.append(state[name] / (1 - beta**count))
    direction = means[0] / (means[1].sqrt() + options["eps"])
    move: Tensor = -lr * (direction + options["weight_decay"] * weight)
    return move


def _adamw8bit(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    move = _adamw(state, gradient, weight, lr, count, options)
    if weight.numel() >= FLOATS:
        state["mean"], state["square"] = _rounded(state["mean"], True), _rounded(state["square"], False)
    return move


def _rounded(moment: Tensor, signed: bool) -> Tensor:
    """To the nearest of a byte's 256 shares of the largest number of its block; a square never to 0."""
    book = _book(signed)
    flat = torch.cat([moment.flatten(), torch.zeros(-moment.numel() % BLOCK, dtype=moment.dtype)]).view(-1, BLOCK)
    scales = flat.abs().amax(1, keepdim=True)
    shares = flat / scales.clamp(min=ZERO)
    above = torch.searchsorted(book, shares.contiguous()).clamp(1, 255)
    nearer = (book[above] - shares).abs() < (shares - book[above - 1]).abs()
    at = torch.where(nearer, above, above - 1).clamp(min=0 if signed else 1)
    return (book[at] * scales).flatten()[: moment.numel()].view_as(moment)


def _book(signed: bool) -> Tensor:
    """Dynamic tree quantisation: 0, 1 and the middles of evenly cut decades, each cut in twice as many as the next."""
    values = [0.0, 1.0]
    for decade in range(7):
        cuts = 2**decade * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (2 * i + 1) / (2 * cuts)) * 10.0 ** (decade - 6) for i in range(cuts)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


def _adafactor(state: State, gradient: Tensor, weight: Tensor, lr: float, count: int, options: Options) -> Tensor:
    squares, share = gradient.square(), count ** options["beta2_decay"]
    kept = {"all": squares} if gradient.dim() < 2 else {"rows": squares.mean(-1), "columns": squares.mean(-2)}
    for name, value in kept.items():
        state[name] = (1 - share) * state.get(name, torch.zeros_like(value)) + share * value
    if gradient.dim() < 2:
        estimate = state["all"]
    else:
        rows, columns = state["rows"], state["columns"]
        estimate = rows[..., None] * columns[..., None, :] / rows.mean(-1)[..., None, None].clamp(min=ZERO)
    direction = torch.where(estimate > 0, gradient / estimate.clamp(min=ZERO).sqrt(), 0.0)
    direction = direction / max(1.0, _rms(direction) / options["clip_rms"])
    scale = max(options["scale_floor"], _rms(weight)) * min(lr, count**-0.5)
    move: Tensor = -scale * direction - lr * options["weight_decay"] * weight
    return move


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean()))


RULES: Mapping[str, Callable[[State, Tensor, Tensor, float, int, Options], Tensor]] = {
    "adamw": _adamw,
    "adamw_cpu": _adamw,
    "adamw8bit": _adamw8bit,
    "adafactor": _adafactor,
}
"""How far a weight moves, given what is kept of it, its clipped gradient, itself, the rate, the count of its updates
from 1 and options."""
RELATIVE = ("adafactor",)
"""Those whose rate is a share of the weights."""


TWO_STEPS = "two optimizer steps"
SMALL_STEP = "an optimizer step on gradients as small as eps"
NORMS = "gradient norms as told"

ROUNDING = 2.0**-23
"""What float32 rounds off a weight that is updated, as a share of it."""
CODES = 1e-2
"""Largest distance of an optimizer whose states are bytes: a number between two codes may be rounded to either."""
LEAST_RATE = 1e-3
"""Learning rate of the two steps, at least: of smaller updates float32 weights keep few digits."""
CLIPPED, WHOLE = 4.0, 0.25
"""Norm of the gradient in the first step and in the second, as shares of the norm that is clipped to."""


@dataclass(slots=True)
class Witness:
    """Stands before an optimizer and notes what goes in and out; it changes nothing."""

    real: Stepper
    """The optimizer bound to the parameters."""
    parameters: Mapping[str, Parameter]
    """Those, by name."""
    step_number: int = 0
    """Of the run, from 1."""
    updates: list[Update] = field(default_factory=list)
    """What it did so far."""
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def accumulate(self, parameter: Parameter) -> None:
        """Add up in float32, in the order that they come, and hand on."""
        assert parameter.grad is not None
        (name,) = (name for name, other in self.parameters.items() if other is parameter)
        grad = parameter.grad.detach().float()
        self._sums[name] = self._sums[name] + grad if name in self._sums else grad.clone()
        self.real.accumulate(parameter)

    def step(self, lr: float, max_grad_norm: float) -> Tensor:
        """Let it update, and compare before with after."""
        before = self._weights()
        whole = self.real.step(lr, max_grad_norm)
        self.updates.append(
            Update(step=self.step_number, gradients=self._sums, before=before, after=self._weights(), norm=float(whole))
        )
        self._sums = {}
        return whole

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def zero_grad(self) -> None:
        """Hand on."""
        self._sums = {}
        self.real.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.real.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the optimizer."""
        self.real.load_state_dict(state)


def updates(
    setup: Setup, optimizer: Optimizer, steps: Sequence[StepBatch], total: int, *, begin: Mapping[str, Tensor]
) -> tuple[list[Update], list[float]]:
    """Every update of the first steps, and the gradient norms that the steps reported.

    Args:
        setup: the model as it was loaded; it stays as it is.
        optimizer: the recipe's.
        steps: what each is trained on.
        total: steps of the run.
        begin: what is trained as the first step begins, by name.
    """
    model = copy.deepcopy(setup.model)
    parameters = dict(setup.trainable.parameters(model))
    fold: Callable[[], None] = lambda: setup.trainable.fold(model)  # noqa: E731 - a step takes it
    policy = Policy(model, None, name="certified", compute=Compute(torch.get_num_threads()))
    reference = setup.objective.reference
    with contextlib.closing(policy):
        fold()
        held = None if reference is None else reference.hold([(n, model.get_parameter(n)) for n in setup.changing])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(begin[name])
        witness = Witness(optimizer.bind(list(parameters.items())), parameters)
        work = LocalWork(
            policy=policy, objective=setup.objective, stepper=witness, sampling=setup.sampling, held=held, fold=fold
        )
        step = Step(work=work, optimizer=optimizer, steps=total, updates_per_batch=setup.updates)
        norms: list[float] = []

        async def run() -> None:
            for number, batch in enumerate(steps, 1):
                fold()  # as it is published
                witness.step_number = number
                stats = await step.forward_backward(batch)
                norms.append(flatten(await step.apply(number, batch, stats))["grad_norm"])

        asyncio.run(run())
    return witness.updates, norms


def times(batch: StepBatch, factor: float) -> StepBatch:
    """The same step with every token's loss times a factor, and so its gradient."""
    micro = (dataclasses.replace(micro, weights_N=micro.weights_N * factor) for micro in batch.micro)
    return dataclasses.replace(batch, micro=tuple(micro))


def visible(optimizer: Optimizer) -> Optimizer:
    """The same at a rate whose updates float32 weights show, and for such weights."""
    float32: dict[str, Any] = {"gradients": "float32"} if hasattr(optimizer, "gradients") else {}
    return dataclasses.replace(optimizer, lr=max(optimizer.lr, LEAST_RATE), **float32)


def two(batch: StepBatch, optimizer: Optimizer, size: float) -> list[StepBatch]:
    """Two steps on a batch whose gradient has this norm, the first clipped and the second not."""
    most = optimizer.max_grad_norm or 1.0
    return [times(batch, share * most / (size or 1.0)) for share in (CLIPPED, WHOLE)]


Updates = Callable[[Optimizer, Sequence[StepBatch], int], tuple[list[Update], list[float]]]
"""As ``updates``, given the optimizer, what steps are trained on, and the steps of the run."""


def lines(
    make: Updates,
    optimizer: Optimizer,
    known: tuple[str, Options],
    batch: StepBatch,
    size: float,
    *,
    total: int,
    bound: float,
) -> Iterator[CertificateLine]:
    """Two steps on a batch, the first clipped and the second not, against the formula.

    Args:
        make: makes them.
        optimizer: the recipe's.
        known: its kind and options, as plain data.
        batch: what both steps are trained on.
        size: the norm of its gradient.
        total: steps of the run.
        bound: largest distance, rounding of the weights aside.
    """
    total = max(total, 2)
    optimizer, steps = visible(optimizer), two(batch, optimizer, size)
    made, reported = make(optimizer, steps, total)
    num = len(made) // len(steps)
    line = _moved_line(TWO_STEPS, made, known, optimizer.lr, total, bound)
    yield dataclasses.replace(line, note=f"{len(made)} updates by {len(batch.micro)} micro-batches")
    if known[1].get("eps"):
        numbers = sum(weight.numel() for weight in made[0].before.values())
        small, _ = make(optimizer, [times(batch, known[1]["eps"] * math.sqrt(numbers) / (size or 1.0))], total)
        yield _moved_line(SMALL_STEP, small, known, optimizer.lr, total, bound)
    norms = [norm([one.gradients]) for one in made]
    pairs = [*zip((one.norm for one in made), norms, strict=True), *zip(reported, norms[::num], strict=True)]
    yield judged(NORMS, [max(abs(one - other) / (other or 1.0) for one, other in pairs)], bound, "float64 formula")


def _moved_line(
    name: str, made: Sequence[Update], known: tuple[str, Options], lr: float, total: int, bound: float
) -> CertificateLine:
    """How the weights moved against the formula, given the gradients and the weights before."""
    expected = list(moves((known[0], {**known[1], "lr": lr}), made, total))
    rounding = ROUNDING * norm([one.before for one in made]) / (norm(expected) or 1.0)
    allowed = max(bound, CODES if known[0] == "adamw8bit" else 0.0) + rounding
    return judged(name, [distance([one.moved for one in made], expected)], allowed, "float64 formula")


NARROW = "bfloat16 weights"
BIAS = "bfloat16 rounding"

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

BIASED = 0.05
"""Largest mean of what rounding may leave, in last bits: weights that are cut off are half of one too small."""
WALK, SIGMAS = 2.0, 4.0
"""Deviation of what as many roundings at random leave, in last bits, and so many deviations of its mean are chance."""


Bind = Callable[[Optimizer, Sequence[tuple[str, Parameter]]], tuple[Stepper, Callable[[], None]]]
"""Binds an optimizer to parameters; the stepper, and what ends each micro-batch."""


def bound_alone(optimizer: Optimizer, named: Sequence[tuple[str, Parameter]]) -> tuple[Stepper, Callable[[], None]]:
    """As ``Bind``, by one process."""
    return optimizer.bind(named), lambda: None


def narrow_weights(
    optimizer: Optimizer,
    kind: str,
    weights: Mapping[str, Tensor],
    gradients: Gradient,
    bind: Bind = bound_alone,
    *,
    micros: int = MICRO,
    mine: int = MICRO,
) -> dict[str, Parameter]:
    """Bfloat16 weights after updates that are each smaller than their last bit, by name.

    Args:
        optimizer: the recipe's.
        kind: its name.
        weights: what is trained, by name.
        gradients: of these.
        bind: binds the optimizer.
        micros: micro-batches of an update.
        mine: those that this process computes.
    """
    parameters = {name: Parameter(weights[name].bfloat16()) for name in _some(weights)}
    grads = _of_micros(gradients, parameters, micros)
    steady = _steady(optimizer, kind, parameters)
    stepper, end_micro = bind(steady, list(parameters.items()))
    for _ in range(UPDATES):
        for _ in range(mine):
            for name, parameter in parameters.items():
                parameter.grad = grads[name].clone()
                stepper.accumulate(parameter)
            end_micro()
        stepper.step(steady.lr, steady.max_grad_norm)
    return parameters


def _of_micros(gradients: Gradient, names: Iterable[str], micros: int) -> dict[str, Tensor]:
    """What each micro-batch of so many gives to a gradient."""
    return {name: (gradients[name] / micros).bfloat16() for name in names}


def _steady(optimizer: Optimizer, kind: str, weights: Mapping[str, Tensor]) -> Optimizer:
    """The same at a constant rate, by which weights move by ``STEP`` of themselves."""
    whole = norm([{name: weight.detach() for name, weight in weights.items()}])
    typical = whole / math.sqrt(sum(weight.numel() for weight in weights.values()))
    lr = STEP * (1.0 if kind in RELATIVE else typical)
    return dataclasses.replace(optimizer, lr=lr, warmup_steps=0, schedule="constant")


def narrow_lines(
    optimizer: Optimizer,
    known: tuple[str, Options],
    weights: Mapping[str, Tensor],
    gradients: Gradient,
    moved: Mapping[str, Parameter],
    *,
    micros: int = MICRO,
) -> Iterator[CertificateLine]:
    """The weights' change as a share of the formula's, and the mean of what rounding left, in last bits.

    Args:
        optimizer: the recipe's.
        known: its kind and options, as plain data.
        weights: what is trained, by name.
        gradients: of these.
        moved: where ``narrow_weights`` brought them.
        micros: micro-batches of an update.
    """
    begin = {name: weights[name].bfloat16().double() for name in moved}
    grads = _of_micros(gradients, moved, micros)
    lr = _steady(optimizer, known[0], begin).lr
    exact = dict(begin)

    def coming() -> Iterator[Update]:
        for step in range(1, UPDATES + 1):
            whole = {name: grad.double() * micros for name, grad in grads.items()}
            yield Update(step=step, gradients=whole, before=dict(exact), after={}, norm=0.0)

    plain = {**known[1], "lr": lr, "warmup_steps": 0, "schedule": "constant"}
    for move in moves((known[0], plain), coming(), UPDATES):
        for name in exact:
            exact[name] = exact[name] + move[name]
    way = {name: exact[name] - begin[name] for name in begin}
    went = math.fsum(float(((p.detach().double() - begin[n]) * way[n]).sum()) for n, p in moved.items())
    share = went / (norm([way]) ** 2 or 1.0)
    yield judged(NARROW, [abs(share - 1)], LOST, "float64 formula", f"{UPDATES} updates of part of their last bit")
    exact_N = torch.cat([exact[name].flatten() for name in moved])
    ended_N = torch.cat([parameter.detach().double().flatten() for parameter in moved.values()])
    largest_N = torch.maximum(exact_N.abs(), ended_N.abs())
    off_N = torch.ldexp(ended_N - exact_N, 8 - torch.frexp(largest_N).exponent)  # a bfloat16 has 8 bits
    means = [abs(float(off_N.mean())), abs(float((off_N * exact_N.sign()).mean()))]
    yield judged(
        BIAS, means, BIASED + SIGMAS * WALK / math.sqrt(len(off_N)), "0", "mean error in last bits, down or to 0"
    )


def _some(weights: Mapping[str, Tensor]) -> list[str]:
    """The first of them that are not too many, the first in any case."""
    names, numbers = list[str](), 0
    for name, weight in weights.items():
        numbers += weight.numel()
        if names and numbers > NUMBERS:
            break
        names.append(name)
    return names
