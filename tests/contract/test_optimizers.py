"""What every optimizer keeps, whatever its formula and however it writes bfloat16 weights; on an accelerator too."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import Parameter

from tandem.config.registry import find, kind_of, names, options
from tandem.errors import CheckpointError
from tandem.optimizers.base import Optimizer, Stepper

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = {"matrix": (96, 130), "vector": (33,), "odd": (65, 67), "small": (5, 7)}


def cases() -> Iterator[tuple[str, dict[str, str], torch.dtype, str]]:
    for kind, device in product(names("optimizers"), DEVICES):
        precise = any(field.name == "precision" for field in options(find("optimizers", kind)))
        yield kind, {}, torch.float32, device
        if not precise:
            yield kind, {}, torch.bfloat16, device
            continue
        for precision, summed in product(("masters", "stochastic"), ("float32", "bfloat16")):
            yield kind, {"precision": precision, "gradients": summed}, torch.bfloat16, device


Case = tuple[Optimizer, torch.dtype, str]


@pytest.fixture(
    params=list(cases()), ids=lambda p: "-".join([p[0], *p[1].values(), str(p[2]).rpartition(".")[2], p[3]])
)
def case(request: pytest.FixtureRequest) -> Case:
    kind, settings, dtype, device = request.param
    return find("optimizers", kind)(**settings), dtype, device


def parameters(dtype: torch.dtype, device: str) -> list[tuple[str, Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (name, Parameter((torch.randn(shape, generator=generator) * 0.1).to(device, dtype)))
        for name, shape in SHAPES.items()
    ]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]


def sums_narrow(case: Case) -> bool:
    optimizer, dtype, _ = case
    return dtype is torch.bfloat16 and getattr(optimizer, "gradients", "float32") == "bfloat16"


def give(stepper: Stepper, named: Sequence[tuple[str, Parameter]], grads: Sequence[Tensor]) -> None:
    """What a backward pass with hooks does."""
    for (_, parameter), grad in zip(named, grads, strict=True):
        parameter.grad = grad.to(parameter.device, parameter.dtype, copy=True)
        stepper.accumulate(parameter)
        assert parameter.grad is None


def run(stepper: Stepper, named: Sequence[tuple[str, Parameter]], steps: range, lr: float = 1e-3) -> None:
    for step in steps:
        give(stepper, named, gradients(step))
        assert stepper.step(lr, 1.0) > 1.0


def bits(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of the bytes of each tensor."""
    return {
        name: hashlib.sha256(t.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, t in tensors.items()
    }


def everything(stepper: Stepper, named: Sequence[tuple[str, Parameter]]) -> dict[str, str]:
    return bits({**dict(named), **stepper.state_dict()})


def test_weights_are_written_where_they_are(case: Case) -> None:
    optimizer, dtype, device = case
    named = parameters(dtype, device)
    stepper = optimizer.bind(named)
    addresses = [p.data_ptr() for _, p in named]
    before = [p.detach().clone() for _, p in named]
    run(stepper, named, range(1), lr=0.1)
    assert [p.data_ptr() for _, p in named] == addresses
    assert [p.dtype for _, p in named] == [dtype] * len(named)
    assert not any(torch.equal(p, b) for (_, p), b in zip(named, before, strict=True))


def test_weights_may_move_between_steps(case: Case) -> None:
    """Whoever shares a weight points its data at other memory, perhaps a strided slice of a larger tensor."""
    optimizer, dtype, device = case
    still, moving = parameters(dtype, device), parameters(dtype, device)
    a, b = optimizer.bind(still), optimizer.bind(moving)
    run(a, still, range(1))
    run(b, moving, range(1))
    room = [torch.zeros(*p.shape[:-1], p.shape[-1] + 3, dtype=dtype, device=device) for _, p in moving]
    for (_, parameter), larger in zip(moving, room, strict=True):
        larger[..., :-3].copy_(parameter.detach())
        parameter.data = larger[..., :-3]
    run(a, still, range(1, 3))
    run(b, moving, range(1, 3))
    for (name, parameter), (_, moved), larger in zip(still, moving, room, strict=True):
        assert torch.allclose(parameter.float(), moved.float(), rtol=0, atol=1e-6 if dtype is torch.float32 else 0), (
            name
        )
        assert torch.equal(moved, larger[..., :-3]), "written there"
        assert not larger[..., -3:].any(), "and nowhere else"


@pytest.mark.slow
def test_resume_is_exact_to_the_bit(case: Case) -> None:
    optimizer, dtype, device = case
    straight = parameters(dtype, device)
    a = optimizer.bind(straight)
    run(a, straight, range(3))
    stored = save(a.state_dict())
    weights = {name: p.detach().clone() for name, p in straight}
    torch.manual_seed(99)  # nothing may hang on the global generator
    fresh = parameters(dtype, device)
    b = optimizer.bind(fresh)
    for name, parameter in fresh:
        parameter.data.copy_(weights[name])
    b.load_state_dict(load(stored))
    assert everything(b, fresh) == everything(a, straight)
    run(a, straight, range(3, 6))
    run(b, fresh, range(3, 6))
    assert everything(b, fresh) == everything(a, straight)


def test_state_of_another_run_is_refused(case: Case) -> None:
    optimizer, dtype, device = case
    named = parameters(dtype, device)
    state = optimizer.bind(named).state_dict()
    with pytest.raises(CheckpointError, match=r"entries differ, first '(matrix|odd|small|vector)/"):
        optimizer.bind(named[:1]).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(case: Case, bad: float) -> None:
    optimizer, dtype, device = case
    named, straight = parameters(dtype, device), parameters(dtype, device)
    stepper, undisturbed = optimizer.bind(named), optimizer.bind(straight)
    run(stepper, named, range(1))
    before = everything(stepper, named)
    broken = gradients(1)
    broken[1][7] = bad
    give(stepper, named, broken)
    assert not math.isfinite(stepper.step(0.1, 1.0))
    assert everything(stepper, named) == before
    run(stepper, named, range(2, 3))
    run(undisturbed, straight, range(1))
    run(undisturbed, straight, range(2, 3))
    assert everything(stepper, named) == everything(undisturbed, straight), "as if it had never been"


def test_gradients_add_up_over_micro_batches(case: Case) -> None:
    """256 times 2**-9 after a 1 is 1.5 in float32; in bfloat16 every addend is lost."""
    optimizer, dtype, device = case
    named = [("w", Parameter(torch.ones(64, 64, dtype=dtype, device=device)))]
    stepper = optimizer.bind(named)
    for value in [1.0] + [2.0**-9] * 256:
        give(stepper, named, [torch.full((64, 64), value)])
    assert stepper.step(0.0, 0.0) == (1.0 if sums_narrow(case) else 1.5) * 64


def test_gradients_may_be_strided(case: Case) -> None:
    optimizer, dtype, device = case
    plain, strided = parameters(dtype, device), parameters(dtype, device)
    a, b = optimizer.bind(plain), optimizer.bind(strided)
    give(a, plain, gradients(0))
    for (_, parameter), grad in zip(strided, gradients(0), strict=True):
        parameter.grad = grad.to(device, dtype).t().contiguous().t()
        b.accumulate(parameter)
    a.step(1e-2, 0.0)
    b.step(1e-2, 0.0)
    assert all(torch.allclose(x.float(), y.float(), atol=1e-6) for (_, x), (_, y) in zip(plain, strided, strict=True))


def test_clipped_gradients_are_scaled_to_the_norm(case: Case) -> None:
    optimizer, dtype, device = case
    clipped, scaled = parameters(dtype, device), parameters(dtype, device)
    a, b = optimizer.bind(clipped), optimizer.bind(scaled)
    grads = gradients(0, torch.bfloat16)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    give(a, clipped, grads)
    assert float(a.step(1e-2, norm / 4)) == pytest.approx(norm, rel=1e-6)
    give(b, scaled, [g / 4 for g in grads])
    assert float(b.step(1e-2, 0.0)) == pytest.approx(norm / 4, rel=1e-6)
    for (name, x), (_, y) in zip(clipped, scaled, strict=True):
        assert torch.allclose(x.float(), y.float(), rtol=2**-7, atol=1e-6), name


def test_an_unfinished_step_is_forgotten_and_untouched_parameters_stay(case: Case) -> None:
    optimizer, dtype, device = case
    named = parameters(dtype, device)
    stepper = optimizer.bind(named)
    give(stepper, named, gradients(0))
    stepper.zero_grad()
    before = [p.detach().clone() for _, p in named]
    assert stepper.step(0.1, 1.0) == 0.0
    give(stepper, named[:1], gradients(1)[:1])
    assert stepper.step(0.1, 1.0) > 0.0
    assert not torch.equal(named[0][1], before[0])
    assert all(torch.equal(p, b) for (_, p), b in zip(named[1:], before[1:], strict=True))


@pytest.mark.slow
def test_small_updates_are_not_lost(case: Case) -> None:
    """Two hundred steps of a fiftieth of the last bit each."""
    optimizer, dtype, device = case
    named = [("w", Parameter(torch.full((128, 128), 0.75, dtype=dtype, device=device)))]
    bit = 2.0**-8  # of a bfloat16 from 0.5 to 1
    adafactor = kind_of("optimizers", optimizer) == "adafactor"
    stepper = optimizer.bind(named)
    for _ in range(200):
        give(stepper, named, [torch.ones(128, 128)])
        stepper.step(bit / 50 / (0.75 if adafactor else 1.0), 0.0)
    moved = 0.75 - float(named[0][1].detach().double().mean())
    assert moved == pytest.approx(4 * bit, rel=0.05)


@pytest.mark.slow
def test_it_descends(case: Case) -> None:
    """Least squares: towards a matrix of other random numbers."""
    optimizer, dtype, device = case
    goal = torch.randn(80, 64, generator=torch.Generator().manual_seed(5)).to(device) * 0.1
    weight = Parameter(torch.zeros(80, 64, dtype=dtype, device=device) + 0.1)
    stepper = optimizer.bind([("w", weight)])
    first = float((weight.detach().float() - goal).square().mean())
    for _ in range(200):
        weight.grad = (weight.detach().float() - goal).to(dtype)
        stepper.accumulate(weight)
        stepper.step(0.03 if kind_of("optimizers", optimizer) == "adafactor" else 0.003, 0.0)
    assert float((weight.detach().float() - goal).square().mean()) < 0.02 * first


def test_state_bytes_are_what_is_held(case: Case) -> None:
    optimizer, dtype, device = case
    named = [
        (str(i), Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        for i, shape in enumerate([(900, 1000), (1000,)])
    ]
    stepper = optimizer.bind(named)
    num = sum(p.numel() for _, p in named)
    gradient = (2 if sums_narrow(case) else 4) * num  # made by the first backward pass
    held = sum(tensor.nbytes for tensor in stepper.state_dict().values()) + gradient
    assert optimizer.state_bytes(num, dtype.itemsize) == pytest.approx(held, rel=0.02)
