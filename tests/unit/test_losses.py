"""GRPO's loss and gradient against a float64 reference written from the papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import plain_metrics

from tandem.algorithms.losses.base import MicroBatch, TokenLoss
from tandem.algorithms.losses.grpo import Grpo

RATIOS = (0.1, 0.5, 0.79, 0.81, 1.0, 1.2, 1.27, 1.29, 2.0, 2.9, 3.1, 4.0)


def objective(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """PPO's surrogate (arXiv 1707.06347, equation 7), with the dual clip of arXiv 1912.09729, equation 5."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, clipped * advantage)
    return value if dual is None or advantage >= 0 else max(value, dual * advantage)


def derivative(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """Of the objective by the log of the ratio: r A where the objective follows r, 0 where it is cut off."""
    if advantage > 0:
        follows = ratio < 1 + high
    else:
        follows = ratio > 1 - low and (dual is None or ratio < dual)
    return ratio * advantage if follows else 0.0


def run(loss: Grpo, ratios: list[float], advantages: list[float]) -> tuple[TokenLoss, np.ndarray[Any, Any]]:
    behavior = -torch.linspace(0.1, 3.0, len(ratios), dtype=torch.float64)
    logprobs = (behavior + torch.tensor(ratios, dtype=torch.float64).log()).float().requires_grad_()
    micro = MicroBatch(
        behavior_logprobs_N=behavior.float(),
        advantages_N=torch.tensor(advantages),
        sample_N=torch.zeros(len(ratios), dtype=torch.int64),
        num_samples=1,
    )
    out = loss(logprobs, micro)
    out.loss_N.sum().backward()
    assert logprobs.grad is not None
    return out, logprobs.grad.double().numpy()


@pytest.mark.parametrize("advantage", [1.7, -1.7])
@pytest.mark.parametrize("dual", [3.0, None])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.3, 0.3), (0.45, 1.6)])
def test_loss_and_gradient_equal_the_reference(advantage: float, dual: float | None, low: float, high: float) -> None:
    out, grad = run(Grpo(clip_low=low, clip_high=high, dual_clip=dual), list(RATIOS), [advantage] * len(RATIOS))
    want = np.array([-objective(r, advantage, low, high, dual) for r in RATIOS])
    slope = np.array([-derivative(r, advantage, low, high, dual) for r in RATIOS])
    assert out.loss_N.dtype == torch.float32
    np.testing.assert_allclose(out.loss_N.detach().double().numpy(), want, rtol=1e-6)
    np.testing.assert_allclose(grad, slope, rtol=1e-6)
    assert ((grad == 0) == (slope == 0)).all(), "a clipped token has no gradient at all"


@pytest.mark.parametrize("advantage", [1.7, -1.7])
@pytest.mark.parametrize("dual", [3.0, None])
def test_reference_gradient_is_that_of_the_reference_loss(advantage: float, dual: float | None) -> None:
    h = 1e-6
    for ratio in RATIOS:
        up, down = (objective(ratio * math.exp(d), advantage, 0.2, 0.28, dual) for d in (h, -h))
        assert derivative(ratio, advantage, 0.2, 0.28, dual) == pytest.approx((up - down) / (2 * h), rel=1e-6, abs=1e-9)


def test_what_each_clip_is_for() -> None:
    """Loss by hand at the three ratios that everybody knows."""
    out, grad = run(Grpo(), [0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    assert out.loss_N.tolist() == pytest.approx([-0.5, -1.0, -1.28, 0.8, 1.0, 2.0, 3.0])
    assert grad.tolist() == pytest.approx([-0.5, -1.0, 0.0, 0.0, 1.0, 2.0, 0.0])


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("dual", [3.0, None])
@pytest.mark.parametrize("gap", [-1e4, -200.0, -90.0, 90.0, 200.0, 1e4])
def test_extreme_ratios_are_finite(advantage: float, dual: float | None, gap: float) -> None:
    logprobs = torch.tensor([gap]).requires_grad_()
    micro = MicroBatch(
        behavior_logprobs_N=torch.zeros(1),
        advantages_N=torch.tensor([advantage]),
        sample_N=torch.zeros(1, dtype=torch.int64),
        num_samples=1,
    )
    out = Grpo(dual_clip=dual)(logprobs, micro)
    out.loss_N.sum().backward()
    assert logprobs.grad is not None
    assert bool(out.loss_N.isfinite().all())
    assert bool(logprobs.grad.isfinite().all())
    assert all(math.isfinite(v) for v in plain_metrics(out.metrics).values())


def test_metrics() -> None:
    ratios = [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    out, _ = run(Grpo(), ratios, [-1.0, 1.0, 1.0, -1.0, -1.0, 0.0])
    got = plain_metrics(out.metrics)
    assert got == pytest.approx(
        {
            "ratio": sum(ratios) / 6,
            "ratio/max": 4.0,
            "clip_fraction": 4 / 6,
            "clip_fraction/low": 1 / 6,
            "clip_fraction/high": 3 / 6,
        },
        rel=1e-5,
    )


def test_metrics_of_parts_merge_to_those_of_the_whole() -> None:
    ratios, advantages = list(RATIOS), [(-1.0) ** i for i in range(len(RATIOS))]
    whole, _ = run(Grpo(), ratios, advantages)
    parts = [run(Grpo(), ratios[s], advantages[s])[0] for s in (slice(0, 5), slice(5, None))]
    assert plain_metrics(*(p.metrics for p in parts)) == pytest.approx(plain_metrics(whole.metrics), rel=1e-5)


@pytest.mark.parametrize("wrong", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 0.9}, {"dual_clip": math.inf}])
def test_wrong_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Grpo(**wrong)
