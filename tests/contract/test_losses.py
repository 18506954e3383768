"""What every loss keeps, whatever its formula."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from support.tiny_policy import plain_metrics

from tandem.algorithms.losses.base import Loss, MicroBatch, Reduction, TokenLoss
from tandem.config.registry import find, names


@pytest.fixture(params=names("losses"))
def loss(request: pytest.FixtureRequest) -> Loss:
    return find("losses", request.param)()  # type: ignore[no-any-return]


def micro_batch(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    behavior = -torch.rand(n, generator=generator) * 3
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    micro = MicroBatch(
        behavior_logprobs_N=behavior,
        advantages_N=torch.randn(len(lengths), generator=generator)[sample],
        sample_N=sample,
        num_samples=len(lengths),
        ref_logprobs_N=behavior + torch.randn(n, generator=generator) * 0.1,
    )
    return behavior + torch.randn(n, generator=generator) * 0.3, micro


def take(micro: MicroBatch, logprobs: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, MicroBatch]:
    rows = (micro.sample_N >= first) & (micro.sample_N < last)
    assert micro.ref_logprobs_N is not None
    part = MicroBatch(
        behavior_logprobs_N=micro.behavior_logprobs_N[rows],
        advantages_N=micro.advantages_N[rows],
        sample_N=micro.sample_N[rows] - first,
        num_samples=last - first,
        ref_logprobs_N=micro.ref_logprobs_N[rows],
    )
    return logprobs[rows], part


def gradient(loss: Loss, logprobs: torch.Tensor, micro: MicroBatch) -> tuple[TokenLoss, torch.Tensor]:
    logprobs = logprobs.clone().requires_grad_()
    out = loss(logprobs, micro)
    out.loss_N.sum().backward()
    assert logprobs.grad is not None
    return out, logprobs.grad


def test_one_number_per_token_and_no_reduction(loss: Loss) -> None:
    logprobs, micro = micro_batch([3, 1, 5])
    out, grad = gradient(loss, logprobs, micro)
    assert out.loss_N.shape == (9,)
    assert out.loss_N.dtype == torch.float32
    assert bool(grad.isfinite().all())
    assert loss.reduction in get_args(Reduction)


def test_metrics_are_plain_numbers(loss: Loss) -> None:
    out, _ = gradient(loss, *micro_batch([3, 1, 5]))
    values = plain_metrics(out.metrics)
    assert {"ratio", "ratio/max", "clip_fraction", "clip_fraction/low", "clip_fraction/high"} <= values.keys()
    assert all(type(v) is float and math.isfinite(v) for v in values.values())


def test_samples_do_not_touch_each_other(loss: Loss) -> None:
    logprobs, micro = micro_batch([3, 1, 5, 2])
    whole, grad = gradient(loss, logprobs, micro)
    parts = [gradient(loss, *take(micro, logprobs, *span)) for span in ((0, 2), (2, 3), (3, 4))]
    assert torch.allclose(torch.cat([out.loss_N for out, _ in parts]), whole.loss_N, rtol=1e-6, atol=1e-7)
    assert torch.allclose(torch.cat([g for _, g in parts]), grad, rtol=1e-6, atol=1e-7)
    assert plain_metrics(*(out.metrics for out, _ in parts)) == pytest.approx(plain_metrics(whole.metrics), rel=1e-5)


def test_on_policy_it_pushes_along_the_advantage(loss: Loss) -> None:
    """At equal policies a token of a good sample becomes likelier, of a bad one less likely, of a flat one neither."""
    _, micro = micro_batch([4, 4, 4])
    advantages = torch.tensor([1.5, -0.5, 0.0])[micro.sample_N]
    micro = MicroBatch(
        behavior_logprobs_N=micro.behavior_logprobs_N,
        advantages_N=advantages,
        sample_N=micro.sample_N,
        num_samples=3,
        ref_logprobs_N=micro.behavior_logprobs_N,
    )
    _, grad = gradient(loss, micro.behavior_logprobs_N, micro)
    assert torch.equal(grad.sign(), -advantages.sign())
    assert torch.allclose(grad[0] / grad[4], torch.tensor(-3.0))


def test_no_tokens(loss: Loss) -> None:
    out, grad = gradient(loss, *micro_batch([]))
    assert out.loss_N.shape == grad.shape == (0,)
    assert all(math.isfinite(v) for v in plain_metrics(out.metrics).values())


def test_one_token(loss: Loss) -> None:
    out, grad = gradient(loss, *micro_batch([1]))
    assert out.loss_N.shape == grad.shape == (1,)


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_ratios_stay_finite(loss: Loss, gap: float) -> None:
    _, micro = micro_batch([3, 3])
    out, grad = gradient(loss, micro.behavior_logprobs_N + gap, micro)
    assert bool(out.loss_N.isfinite().all())
    assert bool(grad.isfinite().all())
    assert all(math.isfinite(v) for v in plain_metrics(out.metrics).values())
