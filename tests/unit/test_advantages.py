"""Advantages by hand, and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.advantages.dr_grpo import DrGrpo
from tandem.advantages.grpo import Grpo
from tandem.advantages.rloo import Rloo
from tandem.types import Completion, Group, Rollout, Task, Turn

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def group(*rewards: float | None) -> Group:
    """Siblings with these rewards; None is one that failed."""
    task = Task(id="t", env="e", prompt=(), answer="")
    said = Completion(tokens=(1,), logprobs=(-1.0,), versions=(0,), finish="stop")
    turn = Turn(prompt=(0,), completion=said, temperature=1.0)
    rollouts = tuple(
        Rollout(
            id=f"g/{i}",
            task=task,
            turns=(turn,),
            messages=(),
            status="error" if reward is None else "ok",
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    )
    return Group(id="g", index=0, env="e", rollouts=rollouts)


def test_by_hand() -> None:
    one_of_four = group(1.0, 0.0, 0.0, 0.0)
    assert DrGrpo()(one_of_four) == [0.75, -0.25, -0.25, -0.25]
    assert Rloo()(one_of_four) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert Grpo(eps=1e-12)(one_of_four) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert Grpo(std="population", eps=1e-12)(one_of_four) == pytest.approx([3**0.5, *[-1 / 3**0.5] * 3])


@given(REWARDS, st.sampled_from(["sample", "population"]), st.sampled_from([1e-4, 0.1]))
def test_grpo_is_numpys_standardisation(rewards: list[float], std: str, eps: float) -> None:
    x = np.array(rewards)
    want = (x - x.mean()) / (x.std(ddof=1 if std == "sample" else 0) + eps)
    got = Grpo(std=std, eps=eps)(group(*rewards))  # type: ignore[arg-type]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@given(REWARDS)
def test_rloo_leaves_the_rollout_out_of_its_own_baseline(rewards: list[float]) -> None:
    want = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(Rloo()(group(*rewards)), want, rtol=1e-9, atol=1e-9)


@given(REWARDS)
def test_dr_grpo_is_rloo_scaled_by_a_constant(rewards: list[float]) -> None:
    n = len(rewards)
    scaled = [a * n / (n - 1) for a in DrGrpo()(group(*rewards))]
    np.testing.assert_allclose(Rloo()(group(*rewards)), scaled, rtol=1e-9, atol=1e-9)


def test_failed_siblings_are_in_no_mean_and_no_deviation() -> None:
    for advantage in (Grpo(), DrGrpo(), Rloo()):
        assert advantage(group(1.0, None, 0.0, None, 0.5)) == advantage(group(1.0, 0.0, 0.5))


def test_eps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="eps"):
        Grpo(eps=0.0)
