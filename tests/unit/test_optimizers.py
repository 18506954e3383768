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


def test_norm_of_a_large_matrix_has_all_its_digits() -> None:
    """Ten million equal numbers in float32 lose the fourth digit when they are summed in one row."""
    grads = [torch.full((20_000, 500), 1e-3), torch.tensor(2.0), torch.full((7,), 3.0)]
    want = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert float(global_norm(grads)) == pytest.approx(want, rel=1e-7)


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
