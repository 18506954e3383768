"""Every loss and its gradient against its paper's formula in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import plain_metrics

from tandem.algorithms.losses.base import Loss, MicroBatch
from tandem.algorithms.losses.cispo import Cispo
from tandem.algorithms.losses.grpo import Grpo
from tandem.algorithms.losses.gspo import Gspo
from tandem.algorithms.losses.reinforce import Reinforce
from tandem.algorithms.losses.sapo import Sapo
from tandem.config import registry
from tandem.testing import oracle

Array = np.ndarray[Any, np.dtype[np.float64]]
LENGTHS = (4, 1, 3, 2, 1, 5)
SAMPLE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)


CASES: list[Loss] = [
    Grpo(),
    Grpo(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
    Gspo(),
    Gspo(clip_low=0.2, clip_high=0.1),
    Cispo(),
    Cispo(cap=1.2),
    Sapo(),
    Sapo(temperature_positive=3.0, temperature_negative=0.7),
    Reinforce(),
]


def drawn(seed: int, *, per_token: bool) -> tuple[Array, Array, Array]:
    """Logprobs of now and of old, and advantages; one far ratio on either side."""
    draw = np.random.default_rng(seed)
    old = -np.abs(draw.normal(size=len(SAMPLE))) - 0.05
    now = old + 0.3 * draw.normal(size=len(SAMPLE))
    now[1], now[6] = old[1] + 2.0, old[6] - 2.0
    advantage = draw.normal(size=len(SAMPLE)) if per_token else draw.normal(size=len(LENGTHS))[SAMPLE]
    advantage[3] = 0.0
    return tuple(x.astype(np.float32).astype(np.float64) for x in (now, old, advantage))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("loss", CASES, ids=repr)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient(loss: Loss, recomputed: bool, per_token: bool, seed: int) -> None:
    now, old, advantage = drawn(seed, per_token=per_token)
    old_N = torch.from_numpy(old).float()
    micro = MicroBatch(
        behavior_logprobs_N=old_N + 9.0 if recomputed else old_N,
        recomputed_logprobs_N=old_N if recomputed else None,
        advantages_N=torch.from_numpy(advantage).float(),
        sample_N=torch.from_numpy(SAMPLE),
        num_samples=len(LENGTHS),
    )
    logprobs = torch.from_numpy(now).float().requires_grad_()
    out = loss(logprobs, micro)
    out.loss_N.sum().backward()
    exact_N = torch.from_numpy(now).requires_grad_()
    formula = oracle.LOSSES[registry.kind_of("losses", loss)]
    answers = zip(*(x.split(LENGTHS) for x in (exact_N, *map(torch.from_numpy, (old, advantage)))), strict=True)
    wanted_N = torch.cat([formula(*answer, dataclasses.asdict(loss)) for answer in answers])  # type: ignore[call-overload]
    wanted_N.sum().backward()
    torch.testing.assert_close(out.loss_N.detach().double(), wanted_N.detach(), rtol=1e-5, atol=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad.double(), exact_N.grad, rtol=1e-5, atol=1e-6)


def test_an_answer_of_one_token_has_a_tokens_ratio() -> None:
    micro = MicroBatch(
        behavior_logprobs_N=torch.tensor([-1.0, -2.0]),
        advantages_N=torch.tensor([1.0, -1.0]),
        sample_N=torch.arange(2),
        num_samples=2,
    )
    now = torch.tensor([-0.9, -2.1])
    by_token = Grpo(clip_low=0.3, clip_high=0.3, dual_clip=None)(now, micro).loss_N
    assert torch.equal(Gspo(clip_low=0.3, clip_high=0.3)(now, micro).loss_N, by_token)


def test_totals_are_exact_and_differentiable() -> None:
    lengths = [3, 0, 5, 1]
    micro = MicroBatch(
        behavior_logprobs_N=torch.zeros(9),
        advantages_N=torch.zeros(9),
        sample_N=torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)),
        num_samples=4,
    )
    values = torch.arange(9.0).requires_grad_()
    assert micro.totals(values).tolist() == [3.0, 0.0, 25.0, 8.0]
    assert micro.means(values).tolist() == [1.0, 0.0, 5.0, 8.0]
    micro.means(values).square().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([2 / 3] * 3 + [2.0] * 5 + [16.0])


def test_what_counts_as_clipped() -> None:
    """Above the cap; and where less than half of the gradient of a soft gate is left."""
    micro = MicroBatch(
        behavior_logprobs_N=torch.zeros(5),
        advantages_N=torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0]),
        sample_N=torch.zeros(5, dtype=torch.int64),
        num_samples=1,
    )
    now = torch.tensor([6.0, 4.0, 0.1, 0.9, 7.0]).log()
    metrics = plain_metrics(Cispo(cap=5.0)(now, micro).metrics)
    assert (metrics["clip_fraction/low"], metrics["clip_fraction/high"]) == pytest.approx((0.0, 1 / 5))
    metrics = plain_metrics(Sapo(temperature_positive=3.0, temperature_negative=3.0)(now, micro).metrics)
    assert (metrics["clip_fraction/low"], metrics["clip_fraction/high"]) == pytest.approx((1 / 5, 2 / 5))
    assert plain_metrics(Reinforce()(now, micro).metrics)["clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (Gspo, {"clip_low": 1.5}),
        (Gspo, {"clip_high": -1.0}),
        (Cispo, {"cap": 0.0}),
        (Sapo, {"temperature_negative": 0}),
    ],
)
def test_wrong_options_are_refused(part: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        part(**wrong)
