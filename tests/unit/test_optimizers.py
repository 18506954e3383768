"""AdamW against torch's own, masters of narrow weights, accumulation, resume, rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch.nn import Parameter
from transformers import get_wsd_schedule
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from tandem.errors import CheckpointError
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.base import Stepper, global_norm
from tandem.testing.oracle import rate as formula


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[tuple[str, Parameter]]:
    torch.manual_seed(seed)
    return [(f"layer.{i}", Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate([(7, 5), (3,), (40, 11)])]


def give(stepper: Stepper, named: Sequence[tuple[str, Parameter]], grads: Sequence[torch.Tensor]) -> None:
    """What a backward pass with hooks does."""
    for (_, parameter), grad in zip(named, grads, strict=True):
        parameter.grad = grad.to(parameter.dtype)
        stepper.accumulate(parameter)
        assert parameter.grad is None


def gradients(step: int, scale: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(1000 + step)
    return [torch.randn_like(p) * scale for _, p in parameters()]


def test_equals_torch_for_ten_steps() -> None:
    options = AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1)
    ours, theirs = parameters(), parameters()
    stepper = options.bind(ours)
    torch_adamw = torch.optim.AdamW(
        [p for _, p in theirs], lr=0.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False, fused=False
    )
    for step in range(10):
        lr = 0.01 * (step + 1)
        grads = gradients(step, scale=0.5**step)  # the first ones are clipped, the last are not
        for (_, p), g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        want_norm = float(torch.nn.utils.clip_grad_norm_([p for _, p in theirs], 2.0))
        torch_adamw.param_groups[0]["lr"] = lr
        torch_adamw.step()
        give(stepper, ours, [g.clone() for g in grads])
        assert stepper.step(lr, 2.0) == pytest.approx(want_norm, rel=1e-6)
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_over_micro_batches(dtype: torch.dtype) -> None:
    whole, split = parameters(dtype), parameters(dtype)
    one, many = AdamW().bind(whole), AdamW().bind(split)
    for step in range(3):
        parts = [[g.bfloat16().float() for g in gradients(10 * step + i)] for i in range(4)]
        total = [torch.stack(column).double().sum(0).float() for column in zip(*parts, strict=True)]
        give(one, whole, total)
        for part in parts:
            give(many, split, part)
        assert float(one.step(0.01, 0.0)) == pytest.approx(
            float(many.step(0.01, 0.0)), rel=1e-6 if dtype is torch.float32 else 1e-2
        )
        for (_, a), (_, b) in zip(whole, split, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-6 if dtype is torch.float32 else 1e-3)


def test_narrow_gradients_are_summed_in_float32() -> None:
    """1 + 256 * 2**-9 is 1.5; in bfloat16 every addend would be lost."""
    named = [("w", Parameter(torch.zeros(1, dtype=torch.bfloat16)))]
    stepper = AdamW().bind(named)
    for value in [1.0] + [2.0**-9] * 256:
        give(stepper, named, [torch.full((1,), value)])
    assert stepper.step(0.0, 0.0) == 1.5


def test_masters_keep_updates_smaller_than_a_bit_of_the_weight() -> None:
    named = [("w", Parameter(torch.ones(4, dtype=torch.bfloat16)))]
    weight = named[0][1]
    address = weight.data_ptr()
    stepper = AdamW().bind(named)
    seen = []
    for _ in range(100):
        give(stepper, named, [torch.ones(4)])
        stepper.step(1e-4, 0.0)
        seen.append(weight.detach()[0].item())
    assert seen[0] == 1.0, "one update is under half of the last bit, 2**-8"
    assert seen[-1] == float(torch.tensor(0.99).bfloat16()), "a hundred of them are not"
    assert weight.data_ptr() == address, "written in place"
    assert weight.dtype == torch.bfloat16
    master = stepper.state_dict()["w/master"]
    assert torch.equal(weight.detach(), master.bfloat16()), "rounded to nearest from the master"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_exact_to_the_bit(dtype: torch.dtype) -> None:
    straight, resumed = parameters(dtype), parameters(dtype)
    a, b = AdamW(weight_decay=0.01).bind(straight), AdamW(weight_decay=0.01).bind(resumed)
    for step in range(3):
        for stepper, named in ((a, straight), (b, resumed)):
            give(stepper, named, gradients(step))
            stepper.step(1e-3, 1.0)
    saved = {name: tensor.clone() for name, tensor in b.state_dict().items()}
    fresh = [(name, Parameter(p.detach().clone())) for name, p in resumed]
    c = AdamW(weight_decay=0.01).bind(fresh)
    c.load_state_dict(saved)
    for step in range(3, 6):
        for stepper, named in ((a, straight), (c, fresh)):
            give(stepper, named, gradients(step))
            stepper.step(1e-3, 1.0)
    for (_, x), (_, y) in zip(straight, fresh, strict=True):
        assert torch.equal(x, y)
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, c.state_dict()[name]), name


def test_state_of_other_parameters_is_refused() -> None:
    named = parameters()
    state = AdamW().bind(named).state_dict()
    with pytest.raises(CheckpointError, match=r"layer\.1/"):
        AdamW().bind(named[:1]).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"layer\.0/exp_avg"):
        AdamW().bind([("layer.0", Parameter(torch.zeros(2)))]).load_state_dict(
            {name: tensor for name, tensor in state.items() if name.startswith("layer.0/")}
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    named = parameters(dtype)
    stepper = AdamW().bind(named)
    give(stepper, named, gradients(0))
    stepper.step(0.1, 1.0)
    weights = [p.detach().clone() for _, p in named]
    state = {name: tensor.clone() for name, tensor in stepper.state_dict().items()}
    broken = gradients(1)
    broken[1][0] = bad
    give(stepper, named, broken)
    assert not math.isfinite(stepper.step(0.1, 1.0))
    assert all(torch.equal(p, w) for (_, p), w in zip(named, weights, strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in stepper.state_dict().items())
    give(stepper, named, gradients(2))
    assert math.isfinite(stepper.step(0.1, 1.0)), "the broken gradient is forgotten"


def test_clipping_scales_to_the_norm_and_zero_never_clips() -> None:
    def moment(max_norm: float) -> float:
        named = [("w", Parameter(torch.zeros(2)))]
        stepper = AdamW(beta1=0.0).bind(named)
        give(stepper, named, [torch.tensor([3.0, 4.0])])
        assert stepper.step(0.0, max_norm) == 5.0
        return float(stepper.state_dict()["w/exp_avg"].norm())

    assert moment(1.0) == pytest.approx(1.0)
    assert moment(5.0) == 5.0
    assert moment(0.0) == 5.0


def test_norm_of_a_large_matrix_has_all_its_digits() -> None:
    """Ten million equal numbers in float32 lose the fourth digit when they are summed in one row."""
    grads = [torch.full((20_000, 500), 1e-3), torch.tensor(2.0), torch.full((7,), 3.0)]
    want = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert float(global_norm(grads)) == pytest.approx(want, rel=1e-7)


def test_unfinished_step_is_forgotten_and_untouched_parameters_stay() -> None:
    named = parameters()
    stepper = AdamW(weight_decay=0.5).bind(named)
    give(stepper, named, gradients(0))
    stepper.zero_grad()
    before = [p.detach().clone() for _, p in named]
    assert stepper.step(0.1, 1.0) == 0.0
    give(stepper, named[:1], gradients(1)[:1])
    stepper.step(0.1, 1.0)
    assert not torch.equal(named[0][1], before[0])
    assert torch.equal(named[1][1], before[1])


def test_it_works_as_a_hook_of_backward() -> None:
    layer = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    stepper = AdamW().bind(list(layer.named_parameters()))
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(stepper.accumulate)
    before = layer.weight.detach().clone()
    for _ in range(2):
        layer(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is None
    assert stepper.step(0.1, 0.0) == pytest.approx(math.sqrt(8 * 36 + 2 * 36))
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize(("dtype", "held"), [(torch.float32, 2), (torch.bfloat16, 3)])
def test_state_bytes_are_what_is_held(dtype: torch.dtype, held: int) -> None:
    named = parameters(dtype)
    n = sum(p.numel() for _, p in named)
    stepper = AdamW().bind(named)
    state = sum(t.nbytes for name, t in stepper.state_dict().items() if not name.endswith("/step"))
    assert state == held * 4 * n
    assert AdamW().state_bytes(n, dtype.itemsize) == state + 4 * n  # and the gradient


def test_rates() -> None:
    warm = AdamW(lr=1.0, warmup_steps=4)
    assert [warm.rate(step, 10) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = AdamW(lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.2)
    assert [linear.rate(step, 6) for step in range(1, 7)] == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = AdamW(lr=2.0, schedule="cosine")
    assert [cosine.rate(step, 4) for step in (2, 4, 9)] == pytest.approx([1.0, 0.0, 0.0])
    assert AdamW(lr=1.0).rate(1, 10) == 1.0


@pytest.mark.parametrize("decay", ["cosine", "linear", "1-sqrt"])
def test_warmup_stable_decay_is_transformers(decay: Literal["cosine", "linear", "1-sqrt"]) -> None:
    """Whose first step is its step 0, which is none here: the last step has the lowest rate."""
    own = AdamW(lr=2.0, warmup_steps=3, schedule="warmup_stable_decay", decay_steps=4, decay=decay, min_lr_ratio=0.1)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = get_wsd_schedule(plain, 3, 4, num_training_steps=12, decay_type=decay, min_lr_ratio=0.1)
    rates = [scheduler.lr_lambdas[0](step) * 2.0 for step in range(1, 13)]
    assert [own.rate(step, 12) for step in range(1, 13)] == pytest.approx(rates)
    assert [formula(vars(own), step, 12) for step in range(1, 13)] == pytest.approx(rates)


def test_cosine_with_a_least_rate_is_transformers() -> None:
    own = AdamW(lr=2.0, warmup_steps=3, schedule="cosine", min_lr_ratio=0.25)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(plain, 3, 12, min_lr=0.5)
    rates = [scheduler.lr_lambdas[0](step) * 2.0 for step in range(1, 13)]
    assert [own.rate(step, 12) for step in range(1, 13)] == pytest.approx(rates)


@pytest.mark.parametrize(
    "wrong", [{"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1.0}, {"lr": math.nan}, {"weight_decay": -1.0}]
)
def test_wrong_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdamW(**wrong)
