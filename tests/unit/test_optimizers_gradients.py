"""Gradients summed in bfloat16: how far off a sum may be, what is held, and that nothing else of a step is narrow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import Parameter

from tandem.config import loading as config
from tandem.errors import ConfigError
from tandem.model import compilation
from tandem.optimizers import _adam, _byte_moments, _narrow, _precise
from tandem.optimizers._adam import FloatMoments
from tandem.optimizers._precise import Precise, TrainedWeight
from tandem.optimizers.adafactor import Adafactor
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.adamw8bit import AdamW8bit
from tandem.optimizers.base import ParameterPart

KINDS: tuple[type[Precise], ...] = (AdamW, AdamW8bit, Adafactor)
PRECISIONS: tuple[Literal["masters", "stochastic"], ...] = ("masters", "stochastic")
ROUNDING = 2.0**-8 + 2.0**-23
"""Most that one sum loses, as a share of itself: rounded to 24 bits and then to 8."""

every = pytest.mark.parametrize(
    ("kind", "precision"), list(product(KINDS, PRECISIONS)), ids=lambda p: p if isinstance(p, str) else p.__name__
)


def micro_batches(num: int, *shape: int, mean: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Gradients as backward gives them for bfloat16 weights."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) + mean).bfloat16() for _ in range(num)]


def bound(options: Precise, weight: Tensor) -> tuple[Any, Parameter]:
    parameter = Parameter(weight.clone())
    return options.bind([("w", parameter)]), parameter


def give(stepper: Any, parameter: Parameter, grads: Iterable[Tensor]) -> None:
    for grad in grads:
        parameter.grad = grad.clone()
        stepper.accumulate(parameter)


def start(*shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1).bfloat16()


@pytest.mark.parametrize("mean", [0.0, 1.0, -1.0], ids=["random", "positive", "negative"])
@pytest.mark.parametrize("num", [1, 2, 8, 32])
def test_a_sum_is_off_by_its_roundings_and_no_more(num: int, mean: float) -> None:
    grads = micro_batches(num, 300, 70, mean=mean)
    stepper, weight = bound(AdamW(gradients="bfloat16"), start(300, 70))
    give(stepper, weight, grads)
    summed = stepper.weights[0].gradient
    assert summed.dtype == torch.bfloat16
    exact, allowed = grads[0].double(), torch.zeros(300, 70, dtype=torch.float64)
    for grad in grads[1:]:  # what was off stays so, and what is there is rounded once more
        exact = exact + grad.double()
        allowed = allowed + ROUNDING * (exact.abs() + allowed)
    error = (summed.double() - exact).abs()
    assert bool((error <= allowed).all())
    if num == 1:
        assert torch.equal(summed, grads[0]), "nothing is lost"
    else:
        assert float(error.norm() / exact.norm()) < 0.0025 * math.sqrt(num / 2), "errors are of both signs"


def test_the_first_gradient_is_moved_in_and_nothing_is_held_between_steps() -> None:
    stepper, weight = bound(AdamW8bit(gradients="bfloat16", precision="stochastic"), start(80, 64))
    trained = stepper.weights[0]
    for _ in range(2):
        weight.grad = grad = torch.ones(80, 64, dtype=torch.bfloat16)
        stepper.accumulate(weight)
        assert trained.gradient.data_ptr() == grad.data_ptr()
        give(stepper, weight, [grad * 2])
        assert trained.gradient.data_ptr() == grad.data_ptr(), "added in place"
        assert bool((grad == 3).all())
        stepper.step(1e-3, 1.0)
        assert trained.buffer is None
    weight.grad = torch.ones(64, 80, dtype=torch.bfloat16).t()
    stepper.accumulate(weight)
    assert trained.gradient.is_contiguous()


def updated(options: Precise, shape: tuple[int, ...], num: int, clip: float, steps: int = 4) -> tuple[Tensor, Any]:
    """A weight in all the bits that are kept of it, and the optimizer."""
    stepper, weight = bound(options, start(*shape))
    lr = 0.05 if isinstance(options, Adafactor) else 0.01
    for step in range(steps):
        give(stepper, weight, micro_batches(num, *shape, seed=step))
        stepper.step(lr, clip)
    return weight.detach().float(), stepper


@every
@pytest.mark.parametrize("shape", [(70, 130), (33,)], ids=str)
def test_one_micro_batch_updates_as_float32_gradients_do(kind: Any, precision: Any, shape: tuple[int, ...]) -> None:
    """To the last bits of a float32, clipped or not: what is read is widened before it is scaled."""
    for clip in (0.0, 0.5):
        wide, with_wide = updated(kind(precision=precision), shape, 1, clip)
        narrow, with_narrow = updated(kind(precision=precision, gradients="bfloat16"), shape, 1, clip)
        for name, tensor in with_wide.state_dict().items():
            other = with_narrow.state_dict()[name]
            if tensor.dtype == torch.float32:
                assert torch.allclose(tensor, other, rtol=2e-6, atol=1e-9), name
            else:
                assert int((tensor.int() - other.int()).abs().max()) <= 1, name
        assert torch.allclose(wide, narrow, rtol=2**-7, atol=1e-6)
        assert float((wide == narrow).float().mean()) > 0.99
        assert with_wide.state_dict().keys() == with_narrow.state_dict().keys(), "a gradient is no state"


def test_beside_masters_some_are_widened_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones together, a large one in pieces; the update is that by float32 gradients."""
    shapes = [(30, 30), (9,), (70, 77), (20, 20), (5,), (30, 31)]
    widened = list[int]()

    def states(gradients: Literal["float32", "bfloat16"]) -> dict[str, Tensor]:
        weights = [Parameter(start(*shape)) for shape in shapes]
        stepper = AdamW(gradients=gradients).bind([(str(i), weight) for i, weight in enumerate(weights)])
        for step in range(2):
            for i, weight in enumerate(weights):
                give(stepper, weight, micro_batches(1, *weight.shape, seed=10 * step + i))
            stepper.step(1e-2, 0.5)
        return stepper.state_dict() | {f"weight {i}": weight.detach() for i, weight in enumerate(weights)}

    wide, by_torch = states("float32"), FloatMoments._adamw

    def noted(self: Any, lr: float, guard: Any, values: Any, grads: Any, *of_each: Any) -> None:
        widened.append(sum(grad.numel() for grad in grads))
        by_torch(self, lr, guard, values, grads, *of_each)

    monkeypatch.setattr(_adam, "PIECE", 1000)
    monkeypatch.setattr(FloatMoments, "_adamw", noted)
    for name, tensor in states("bfloat16").items():
        assert torch.allclose(tensor.float(), wide[name].float(), rtol=2e-6, atol=1e-9), name
    assert widened == [900 + 9, 400 + 5, 930, *[1000] * 5, 390] * 2


def test_what_it_cannot_be_is_refused(tmp_path: Path) -> None:
    half = Parameter(torch.ones(3, dtype=torch.float16))
    with pytest.raises(ConfigError, match=r"gradients: bfloat16 is not for w of torch\.float16"):
        TrainedWeight(ParameterPart(name="w", parameter=half), "masters", narrow_gradient=True)

    def read(optimizer: dict[str, str], overrides: Sequence[str] = ()) -> Any:
        recipe = {"model": "x", "steps": 1, "env": "arithmetic", "optimizer": optimizer}
        return config.from_options(recipe, overrides, tmp_path).config.optimizer

    assert read({"kind": "adafactor", "gradients": "bfloat16"}).gradients == "bfloat16"
    with pytest.raises(ConfigError, match=r"optimizer\.gradients changes nothing: dtype: float32 gives float32"):
        read({"gradients": "bfloat16"}, ["dtype=float32"])
    with pytest.raises(ConfigError, match="unknown option 'gradients' of optimizer"):
        read({"kind": "adamw_cpu", "gradients": "bfloat16"})
    with pytest.raises(ConfigError, match=r"optimizer\.gradients"):
        read({"gradients": "float16"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clips", [False, True])
def test_eight_bit_steps_by_compiled_code_are_those_without(
    precision: Literal["masters", "stochastic"],
    clips: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a GPU: of weights and gradients as they are kept, in larger pieces, and of a small tensor."""
    torch._dynamo.reset()
    counters.clear()
    shapes = {"large": (300, 256), "odd": (70, 77), "small": (9,)}

    def steps() -> list[Tensor]:
        weights = {name: Parameter(start(*shape)) for name, shape in shapes.items()}
        options = AdamW8bit(weight_decay=0.1, precision=precision, gradients="bfloat16")
        stepper = options.bind(list(weights.items()))
        for seed in range(3):
            for i, weight in enumerate(weights.values()):
                give(stepper, weight, micro_batches(1, *weight.shape, seed=3 * seed + i))
            stepper.step(1e-2, 0.5 if clips else 0.0)
        return [*(w.detach().float() for w in weights.values()), *stepper.state_dict().values()]

    monkeypatch.setattr(_precise, "PIECE", 1 << 14)
    monkeypatch.setattr(_narrow, "PIECE", 1 << 14)
    eager, compiled = steps(), list[Tensor]()
    with monkeypatch.context() as patched:
        for module in (_byte_moments, _narrow):
            patched.setattr(module, "number", lambda value, like: torch.tensor(value))
        patched.setattr(_byte_moments, "LARGE_PIECE", 1 << 16)
        patched.setattr(compilation, "fuses", lambda device: True)
        compiled = steps()
    # One or two for moments of bytes and one for float32 ones, of any size and in all steps; each a whole function.
    assert 0 < counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    assert "uncompiled" not in caplog.text
    for one, other in zip(eager, compiled, strict=True):
        # A fused multiplication and addition rounds once, so a code or a weight in some hundreds is its neighbour.
        apart, size = (one.float() - other.float()).abs(), float(one.float().abs().max())
        assert float((apart > 1e-6 * size).float().mean()) < 2e-3
        assert float(apart.max()) <= (1.0 if one.dtype == torch.uint8 else 2.0**-7 * size)
