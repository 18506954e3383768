"""What every correction keeps, and each one against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tandem.algorithms.corrections.base import Correction
from tandem.algorithms.corrections.geometric import Geometric
from tandem.algorithms.corrections.opsm import Opsm
from tandem.algorithms.corrections.sequence import Sequence
from tandem.algorithms.corrections.token import TokenCorrection
from tandem.algorithms.losses.base import MicroBatch
from tandem.config.registry import find, names

Array = np.ndarray[Any, np.dtype[np.float64]]
LENGTHS = (4, 1, 3, 2, 1, 5, 6)
SAMPLE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)


@pytest.fixture(params=names("corrections"))
def correction(request: pytest.FixtureRequest) -> Correction:
    return find("corrections", request.param)()  # type: ignore[no-any-return]


def micro_batch(lengths: tuple[int, ...], *, recomputed: bool, seed: int = 0) -> tuple[torch.Tensor, MicroBatch]:
    draw = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    old = -torch.rand(n, generator=draw) * 3
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    micro = MicroBatch(
        behavior_logprobs_N=old + torch.randn(n, generator=draw) * 0.5,
        recomputed_logprobs_N=old if recomputed else None,
        advantages_N=torch.randn(len(lengths), generator=draw)[sample] if lengths else torch.zeros(0),
        sample_N=sample,
        num_samples=len(lengths),
    )
    return old + torch.randn(n, generator=draw) * 0.2, micro


@pytest.mark.parametrize("recomputed", [False, True])
def test_one_weight_per_token_without_gradient(correction: Correction, recomputed: bool) -> None:
    logprobs, micro = micro_batch(LENGTHS, recomputed=recomputed)
    weights = correction(logprobs.requires_grad_(), micro)
    assert weights.shape == logprobs.shape
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert bool((weights >= 0).all())
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize("lengths", [(), (1,), (1, 1, 1)])
def test_no_tokens_and_one_token(correction: Correction, lengths: tuple[int, ...]) -> None:
    logprobs, micro = micro_batch(lengths, recomputed=True)
    assert correction(logprobs, micro).shape == (len(lengths),)


def test_nothing_is_corrected_where_policy_and_sampler_agree(correction: Correction) -> None:
    _, micro = micro_batch(LENGTHS, recomputed=False)
    assert torch.equal(correction(micro.behavior_logprobs_N, micro), torch.ones(sum(LENGTHS)))


@pytest.mark.parametrize("recomputed", [False, True])
def test_samples_do_not_touch_each_other(correction: Correction, recomputed: bool) -> None:
    logprobs, micro = micro_batch(LENGTHS, recomputed=recomputed)
    whole = correction(logprobs, micro)
    for s, length in enumerate(LENGTHS):
        mine = micro.sample_N == s
        part = MicroBatch(
            behavior_logprobs_N=micro.behavior_logprobs_N[mine],
            recomputed_logprobs_N=None if micro.recomputed_logprobs_N is None else micro.recomputed_logprobs_N[mine],
            advantages_N=micro.advantages_N[mine],
            sample_N=torch.zeros(length, dtype=torch.int64),
            num_samples=1,
        )
        torch.testing.assert_close(correction(logprobs[mine], part), whole[mine], rtol=1e-6, atol=0)


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("recomputed", [False, True])
def test_extreme_ratios_stay_finite(correction: Correction, gap: float, recomputed: bool) -> None:
    logprobs, micro = micro_batch((3, 3), recomputed=False)
    far = micro.behavior_logprobs_N + gap
    if recomputed:
        micro = MicroBatch(
            behavior_logprobs_N=micro.behavior_logprobs_N,
            recomputed_logprobs_N=far,
            advantages_N=micro.advantages_N,
            sample_N=micro.sample_N,
            num_samples=2,
        )
    weights = correction(logprobs if recomputed else far, micro)
    assert bool(weights.isfinite().all())
    assert float(weights.max()) <= 10


def bounded(ratio: Array, beyond: str, low: float | None, high: float | None) -> Array:
    if beyond == "truncate":
        return np.clip(ratio, low, high)
    out = (ratio < (low or 0)) | (ratio > (math.inf if high is None else high))
    return np.where(out, 0.0, ratio)


def per_answer(values: Array, how: Callable[[Array], Any]) -> Array:
    return np.array([how(values[s == SAMPLE]) for s in SAMPLE])


BOUNDS = [(None, 1.3), (0.8, None), (0.7, 1.5)]


@pytest.mark.parametrize("beyond", ["truncate", "mask"])
@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("level", [TokenCorrection, Sequence])
def test_ratios_of_old_to_sampler(level: Any, beyond: str, low: float | None, high: float | None) -> None:
    """Decoupled: the weight itself; the policy of now does not enter."""
    logprobs, micro = micro_batch(LENGTHS, recomputed=True)
    assert micro.recomputed_logprobs_N is not None
    gap = (micro.recomputed_logprobs_N.double() - micro.behavior_logprobs_N.double()).numpy()
    ratio = np.exp(gap) if level is TokenCorrection else per_answer(gap, lambda g: np.exp(g.sum()))
    want = bounded(ratio, beyond, low, high)
    assert 0 < (want != ratio).sum() < len(want), "some are out of bounds, some within"
    part = level(beyond=beyond, low=low, high=high)
    np.testing.assert_allclose(part(logprobs, micro).numpy(), want, rtol=1e-5)
    np.testing.assert_array_equal(part(logprobs + 1.0, micro).numpy(), part(logprobs, micro).numpy())


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("level", [TokenCorrection, Sequence])
def test_masks_against_the_sampler(level: Any, low: float | None, high: float | None) -> None:
    """Direct: 1 or 0, by the policy of now, for the loss has the ratio inside."""
    logprobs, micro = micro_batch(LENGTHS, recomputed=False)
    gap = (logprobs.double() - micro.behavior_logprobs_N.double()).numpy()
    ratio = np.exp(gap) if level is TokenCorrection else per_answer(gap, lambda g: np.exp(g.sum()))
    want = bounded(ratio, "mask", low, high) > 0
    assert 0 < want.sum() < len(want)
    weights = level(beyond="mask", low=low, high=high)(logprobs, micro)
    np.testing.assert_array_equal(weights.numpy(), want.astype(np.float32))


@pytest.mark.parametrize("recomputed", [False, True])
def test_geometric(recomputed: bool) -> None:
    logprobs, micro = micro_batch(LENGTHS, recomputed=recomputed)
    policy = logprobs if micro.recomputed_logprobs_N is None else micro.recomputed_logprobs_N
    mean = per_answer((policy.double() - micro.behavior_logprobs_N.double()).numpy(), lambda g: np.exp(g.mean()))
    for low, high in ((0.85, 1.2), (None, 1.05), (0.95, None)):
        want = (mean >= (low or 0)) & (mean <= (high or math.inf))
        assert 0 < want.sum() < len(want)
        weights = Geometric(low=low, high=high)(logprobs, micro)
        np.testing.assert_array_equal(weights.numpy(), want.astype(np.float32))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1])
def test_opsm_drops_bad_answers_of_a_policy_that_is_gone(recomputed: bool, threshold: float) -> None:
    logprobs, micro = micro_batch(LENGTHS, recomputed=recomputed, seed=4)
    gap = (micro.behavior_logprobs_N.double() - logprobs.double()).numpy()
    dropped = (micro.advantages_N.numpy() < 0) & (per_answer(gap, np.mean) > threshold)
    assert 0 < dropped.sum() < len(dropped)
    np.testing.assert_array_equal(Opsm(threshold=threshold)(logprobs, micro).numpy(), (~dropped).astype(np.float32))


def test_which_need_recomputed_logprobs() -> None:
    assert TokenCorrection(beyond="truncate").needs_recomputed
    assert Sequence(beyond="truncate").needs_recomputed
    others: list[Correction] = [TokenCorrection(beyond="mask"), Sequence(beyond="mask"), Geometric(), Opsm()]
    assert not any(getattr(part, "needs_recomputed", False) for part in others)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (TokenCorrection, {"high": None}),
        (TokenCorrection, {"high": 0.9}),
        (Sequence, {"low": 1.1}),
        (Geometric, {"low": 0.0}),
        (Geometric, {"high": math.inf}),
        (Opsm, {"threshold": -0.1}),
    ],
)
def test_wrong_options_are_refused(part: Any, wrong: dict[str, float | None]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        part(**wrong)


def test_opsm_keeps_what_has_no_advantage() -> None:
    """It has nothing to push away, and is no masked token in the metrics."""
    micro = MicroBatch(
        behavior_logprobs_N=torch.zeros(3),
        advantages_N=torch.tensor([0.0, 1.0, -1.0]),
        sample_N=torch.arange(3),
        num_samples=3,
    )
    assert Opsm(threshold=0.1)(torch.full((3,), -1.0), micro).tolist() == [1.0, 1.0, 0.0]
