"""AdamW of one byte, AdamW on the host and Adafactor against their papers in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import Parameter

from tandem.config import registry
from tandem.optimizers import _byte_moments as adamw8bit
from tandem.optimizers.adafactor import Adafactor
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.adamw8bit import AdamW8bit
from tandem.optimizers.adamw_cpu import AdamWCpu
from tandem.optimizers.base import Optimizer
from tandem.testing.oracle import ExactOptimizer

CPU = torch.device("cpu")
STEPS = 12


def start(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05


def gradients(*shape: int) -> list[Tensor]:
    """Of very different sizes, as layers and steps have them."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator))
    return [torch.randn(shape, generator=generator) * scale * 1e-4 for _ in range(STEPS)]


def rate(step: int) -> float:
    return 1e-3 * (step + 1) / STEPS


def trained(options: Optimizer, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    weight = Parameter(start(*shape).to(dtype))
    stepper = options.bind([("w", weight)])
    for step, grad in enumerate(gradients(*shape)):
        weight.grad = grad.to(dtype, copy=True)
        stepper.accumulate(weight)
        stepper.step(rate(step), 0.0)
    return weight.detach(), stepper.state_dict()


def exact(options: Optimizer, *shape: int) -> Tensor:
    """Where the weights go by the formulas."""
    warm = {**dataclasses.asdict(options), "lr": rate(STEPS - 1), "warmup_steps": STEPS, "max_grad_norm": 0.0}
    optimizer = ExactOptimizer(registry.kind_of("optimizers", options), warm, STEPS)
    weight = start(*shape).double()
    for step, grad in enumerate(gradients(*shape), 1):
        weight = weight + optimizer.update(step, {"w": grad}, {"w": weight})["w"]
    return weight


def off(weights: Tensor, want: Tensor, shape: tuple[int, ...]) -> float:
    """Root mean square of the error, as a share of the way that the weights went."""
    way = want - start(*shape).double()
    return float((weights.double() - want).square().mean().sqrt() / way.square().mean().sqrt())


@pytest.mark.parametrize("shape", [(64, 96), (50,), (3, 20, 30)])
@pytest.mark.parametrize(
    ("kind", "tolerance"), [(AdamW, 1e-5), (AdamWCpu, 1e-5), (AdamW8bit, 0.03)], ids=["adamw", "cpu", "8bit"]
)
def test_adam(kind: type[AdamW], tolerance: float, shape: tuple[int, ...]) -> None:
    options = kind(beta1=0.8, beta2=0.95, eps=1e-7, weight_decay=0.1)
    weights, _ = trained(options, *shape)
    assert off(weights, exact(options, *shape), shape) < (tolerance if math.prod(shape) >= adamw8bit.SMALL else 1e-5)


@pytest.mark.parametrize("floor", [0.01, 0.2], ids=["above the floor", "below"])
@pytest.mark.parametrize("shape", [(64, 96), (50,), (3, 20, 30)])
def test_adafactor(shape: tuple[int, ...], floor: float) -> None:
    options = Adafactor(scale_floor=floor, clip_rms=0.7, beta2_decay=-0.6, weight_decay=0.1)
    weights, _ = trained(options, *shape)
    assert off(weights, exact(options, *shape), shape) < 1e-4


@pytest.mark.parametrize("shape", [(64, 96), (50,), (3, 20, 30)])
def test_adafactor_with_an_absolute_rate_is_that_of_transformers(shape: tuple[int, ...]) -> None:
    """The step that Atropos' trainer takes: scale_parameter=False, relative_step=False."""
    weights, _ = trained(Adafactor(relative_rate=False), *shape)
    weight = Parameter(start(*shape))
    theirs = transformers.Adafactor([weight], lr=0.0, scale_parameter=False, relative_step=False)
    for step, grad in enumerate(gradients(*shape)):
        weight.grad = grad.clone()
        theirs.param_groups[0]["lr"] = rate(step)
        theirs.step()
    assert off(weights, weight.detach().double(), shape) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_host_it_is_adamw_to_the_bit(dtype: torch.dtype) -> None:
    want, states = trained(AdamW(weight_decay=0.1), 64, 96, dtype=dtype)
    weights, on_host = trained(AdamWCpu(weight_decay=0.1), 64, 96, dtype=dtype)
    assert torch.equal(weights, want)
    assert on_host.keys() == states.keys() | {"w/master"}
    assert all(torch.equal(tensor, on_host[name]) for name, tensor in states.items())
    assert (AdamWCpu.states_on, AdamW.states_on) == ("host", "weights")


@pytest.mark.parametrize("signed", [True, False])
def test_the_book_of_a_byte(signed: bool) -> None:
    book = adamw8bit._book(signed=signed, device=CPU).double()
    assert len(set(book.tolist())) == 256
    assert torch.equal(book, book.sort().values)
    assert (float(book[-1]), float(book[0])) == (1.0, pytest.approx(-0.99297, abs=1e-5) if signed else 0.0)
    positive = book[book > 0]
    steps = positive[1:] / positive[:-1]
    assert float(steps[positive[1:] > 0.5].max()) < (1.03 if signed else 1.015), "finest near 1"
    assert float(positive[0]) == pytest.approx(5.5e-7 if signed else 3.25e-7, rel=1e-6)


@pytest.mark.parametrize("num", [4096, 5000])
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_what_is_written_is_read_back_within_half_a_step(num: int, moment: str) -> None:
    value = torch.randn(num, generator=torch.Generator().manual_seed(4))
    value = value if moment == "exp_avg" else value.square()
    value[256:512] = 0.0
    value[600:800] *= 1e-20
    blocks = math.ceil(num / 256)
    state = {f"{moment}.codes": torch.zeros(num, dtype=torch.uint8), f"{moment}.scales": torch.zeros(blocks)}
    stored = adamw8bit._moment(state, moment, slice(0, num))
    adamw8bit._write(stored, value)
    back = adamw8bit._read(stored)
    book = adamw8bit._book(signed=moment == "exp_avg", device=CPU)
    scale = torch.stack([block.abs().max() for block in value.split(256)]).repeat_interleave(256)[:num]
    nearest = (value[:, None] / scale.clamp_min(1e-38)[:, None] - book).abs().min(1).values * scale
    # A vanishing square is read back as the smallest that a byte can say, not as 0: the update divides by its root.
    floor = 0.0 if moment == "exp_avg" else float(book[1])
    assert bool(((back - value).abs() <= nearest + floor * scale + 2**-11 * value.abs() + 1e-6 * scale).all())
    assert not back[256:512].any()
    if moment == "exp_avg_sq":
        assert bool((back[600:800] > 0).all())


def test_a_vanishing_second_moment_does_not_blow_up_the_step() -> None:
    """One gradient of a block is huge; its siblings, a million times smaller, still move by at most the rate."""
    weight = Parameter(torch.zeros(4096))
    stepper = AdamW8bit().bind([("w", weight)])
    for _ in range(20):
        grad = torch.full((4096,), 1e-6)
        grad[::256] = 1.0
        weight.grad = grad
        before = weight.detach().clone()
        stepper.accumulate(weight)
        stepper.step(1e-3, 0.0)
        assert float((weight.detach() - before).abs().max()) < 3e-3


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (AdamW8bit, {"beta1": 1.0}),
        (AdamWCpu, {"eps": -1.0}),
        (Adafactor, {"beta2_decay": 0.5}),
        (Adafactor, {"clip_rms": 0.0}),
        (Adafactor, {"scale_floor": math.inf}),
        (Adafactor, {"weight_decay": -1.0}),
        (Adafactor, {"lr": math.nan}),
    ],
)
def test_wrong_options_are_refused(kind: type[AdamW], wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)  # type: ignore[arg-type]
