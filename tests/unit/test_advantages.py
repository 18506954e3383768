"""Advantages by hand, and against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.algorithms.advantages.base import advantages
from tandem.algorithms.advantages.batch_std import BatchStd
from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.advantages.gdpo import Gdpo
from tandem.algorithms.advantages.grpo import GroupStandardised
from tandem.algorithms.advantages.maxrl import MaxRl
from tandem.algorithms.advantages.rloo import Rloo
from tandem.errors import ConfigError, RewardError
from tandem.types import Completion, Group, Rollout, Task, Turn

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def group(*rewards: float | None) -> Group:
    """Siblings with these rewards; None is one that failed."""
    task = Task(id="t", env="e", prompt=(), answer="")
    completion = Completion(tokens=(1,), logprobs=(-1.0,), versions=(0,), finish="stop")
    turn = Turn(prompt=(0,), completion=completion, temperature=1.0)
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
    assert GroupStandardised(eps=1e-12)(one_of_four) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert GroupStandardised(std="population", eps=1e-12)(one_of_four) == pytest.approx([3**0.5, *[-1 / 3**0.5] * 3])


def test_an_advantage_of_ones_own_may_return_an_array() -> None:
    values = advantages(lambda one: np.array([0.5, -0.5], dtype=np.float32), [group(1.0, 0.0)])  # type: ignore[arg-type, return-value]
    assert values == [[0.5, -0.5]]
    assert {type(value) for value in values[0]} == {float}


@pytest.mark.parametrize("wrong", [None, 1.0, [0.5], [0.5, None], ["1", "2"], np.ones((2, 1))], ids=str)
def test_an_advantage_of_ones_own_is_a_number_for_each_scored_rollout(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="for group g; expected a list of 2 numbers, one for each"):
        advantages(lambda one: wrong, [group(1.0, 0.0, None)])


@pytest.mark.slow
@given(REWARDS, st.sampled_from(["sample", "population"]), st.sampled_from([1e-4, 0.1]))
def test_grpo_is_numpys_standardisation(rewards: list[float], std: str, eps: float) -> None:
    x = np.array(rewards)
    want = (x - x.mean()) / (x.std(ddof=1 if std == "sample" else 0) + eps)
    got = GroupStandardised(std=std, eps=eps)(group(*rewards))  # type: ignore[arg-type]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@given(REWARDS)
def test_rloo_leaves_the_rollout_out_of_its_own_baseline(rewards: list[float]) -> None:
    want = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(Rloo()(group(*rewards)), want, rtol=1e-9, atol=1e-9)


def test_failed_siblings_are_in_no_mean_and_no_deviation() -> None:
    for advantage in (GroupStandardised(), DrGrpo(), Rloo(), BatchStd(), Gdpo(), MaxRl()):
        assert advantage(group(1.0, None, 0.0, None, 0.5)) == advantage(group(1.0, 0.0, 0.5))


def test_eps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="eps"):
        GroupStandardised(eps=0.0)


def rewarded(*each: dict[str, float], weights: dict[str, float] | None = None, penalty: float = 0.0) -> Group:
    """Siblings with several rewards; the first is penalised besides."""
    weights = weights or {}
    sums = [sum(weights.get(name, 1.0) * value for name, value in rewards.items()) for rewards in each]
    plain = group(*(s - penalty * (i == 0) for i, s in enumerate(sums)))
    rollouts = tuple(replace(r, rewards=rewards) for r, rewards in zip(plain.rollouts, each, strict=True))
    return replace(plain, rollouts=rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("std_of", ["rewards", "deviations"])
@given(rewards=st.lists(REWARDS, min_size=1, max_size=4))
def test_batch_std_divides_by_one_deviation_of_the_step(std_of: Any, rewards: list[list[float]]) -> None:
    centred = [[r - np.mean(mine) for r in mine] for mine in rewards]
    std = np.std([r for mine in (rewards if std_of == "rewards" else centred) for r in mine], ddof=1)
    want = [[r / (std + 1e-4) for r in mine] for mine in centred]
    computed = advantages(BatchStd(std_of=std_of), [group(*mine) for mine in rewards])
    for mine, theirs in zip(computed, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@given(
    st.lists(st.lists(st.tuples(st.floats(-2, 2), st.floats(-50, 50)), min_size=2, max_size=6), min_size=1, max_size=3)
)
def test_gdpo_is_numpys_standardisation_of_each_reward_then_of_their_sum(step: list[list[tuple[float, float]]]) -> None:
    weights = {"a": 1.0, "b": 0.3}
    sums = []
    for mine in step:
        x = np.array(mine)
        z = (x - x.mean(0)) / (x.std(0, ddof=1) + 1e-4)
        sums.append(z @ np.array([1.0, 0.3]))
    every = np.concatenate(sums)
    groups = [rewarded(*({"a": a, "b": b} for a, b in mine), weights=weights) for mine in step]
    computed = advantages(Gdpo().weighed({"e": weights}), groups)
    for got, total in zip(computed, sums, strict=True):
        want = (total - every.mean()) / (every.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_gdpo_tells_apart_what_a_sum_does_not() -> None:
    """The first and the second answer earn the same sum by different rewards of which one is rarer."""
    each = ({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0})
    values = Gdpo()(rewarded(*each))
    assert values[0] > values[1]
    summed = DrGrpo()(rewarded(*each))
    assert summed[0] == summed[1]


def test_gdpo_counts_a_penalty_as_one_more_part() -> None:
    each = ({"a": 1.0}, {"a": 1.0}, {"a": 0.0})
    free, punished = Gdpo()(rewarded(*each)), Gdpo()(rewarded(*each, penalty=0.5))
    assert free[0] == pytest.approx(free[1])
    assert punished[0] < punished[1] - 0.5


def test_maxrl_divides_by_the_share_that_was_solved() -> None:
    assert MaxRl()(group(1.0, 0.0, 0.0, 0.0)) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert MaxRl()(group(1.0, 1.0, 1.0, 0.0)) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert MaxRl()(group(0.0, 0.0)) == [0.0, 0.0]
    with pytest.raises(RewardError, match="has a reward of -1"):
        MaxRl()(group(3.0, -1.0))
