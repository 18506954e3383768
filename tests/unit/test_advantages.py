"""Advantages by hand, and against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.algorithms.advantages.base import advantages, spread
from tandem.algorithms.advantages.batch_std import BatchStd
from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.advantages.gdpo import Gdpo
from tandem.algorithms.advantages.grpo import GroupStandardised
from tandem.algorithms.advantages.maxrl import MaxRl
from tandem.algorithms.advantages.rloo import Rloo
from tandem.algorithms.advantages.turn_returns import TurnReturns
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


def turns(reward: float, *of_turns: float | None) -> Rollout:
    """A rollout of this reward whose turns have these; each turn has one token more than the one before."""
    made = [
        Turn(
            prompt=(0,),
            completion=Completion(tokens=(1,) * n, logprobs=(-1.0,) * n, versions=(0,) * n, finish="stop"),
            temperature=1.0,
            reward=of_turn,
        )
        for n, of_turn in enumerate(of_turns, 1)
    ]
    return replace(group(reward).rollouts[0], turns=tuple(made))


def reference_returns(rewards: np.ndarray, final: np.ndarray, lengths: np.ndarray, discount: float) -> np.ndarray:
    """Advantages of turns by numpy: a row per sibling, and nan after its last turn."""
    longest = rewards.shape[1]
    powers = np.triu(discount ** np.maximum(0, np.subtract.outer(np.arange(longest), np.arange(longest)).T))
    worth = rewards + final[:, None] * (np.arange(longest) == lengths[:, None] - 1)
    returns = worth @ powers.T
    last = np.minimum(np.arange(longest), lengths[:, None] - 1)
    advantages = returns - np.take_along_axis(returns, last, 1).mean(0)
    return np.where(np.arange(longest) < lengths[:, None], advantages, np.nan)


def test_turn_returns_by_hand() -> None:
    one = replace(turns(1.0, 0.5, None), id="g/0")
    other = replace(turns(0.0, 0.0, 0.25, None), id="g/1")
    siblings = Group(id="g", index=0, env="e", rollouts=(one, other))
    # Returns are 1.5, 1 and 0.25, 0.25, 0; the first has ended when the other's third turn comes.
    assert TurnReturns().by_turn(siblings) == [[0.625, 0.375], [-0.625, -0.375, -0.5]]
    assert TurnReturns(discount=0.5).by_turn(siblings)[0][0] == (1.0 - 0.125) / 2
    assert spread(TurnReturns(), siblings).rollouts[0].advantages == (0.625, 0.375, 0.375)


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_turn_returns_are_those_of_numpy(of_turns: list[list[float]], discount: float, seed: int) -> None:
    final = np.random.default_rng(seed).normal(size=len(of_turns))
    rollouts = [
        replace(turns(float(r), *row), id=f"g/{i}") for i, (r, row) in enumerate(zip(final, of_turns, strict=True))
    ]
    lengths = np.array([len(row) for row in of_turns])
    rewards = np.array([[*row, *[0.0] * (lengths.max() - len(row))] for row in of_turns])
    expected = reference_returns(rewards, final, lengths, discount)
    by_turn = TurnReturns(discount=discount).by_turn(Group(id="g", index=0, env="e", rollouts=tuple(rollouts)))
    for row, values in zip(expected, by_turn, strict=True):
        assert values == pytest.approx(list(row[~np.isnan(row)]), abs=1e-9)


@given(REWARDS)
def test_turn_returns_without_rewards_of_turns_are_dr_grpo(rewards: list[float]) -> None:
    rollouts = tuple(replace(turns(r, *[None] * (1 + i % 3)), id=f"g/{i}") for i, r in enumerate(rewards))
    siblings = Group(id="g", index=0, env="e", rollouts=rollouts)
    by_turn = TurnReturns().by_turn(siblings)
    assert [{*row} for row in by_turn] == [{value} for value in DrGrpo()(siblings)]


def test_siblings_whose_turns_differ_are_trained_and_a_discount_is_a_share() -> None:
    rollouts = tuple(replace(turns(1.0, r), id=f"g/{i}") for i, r in enumerate((0.0, 1.0)))
    assert not Group(id="g", index=0, env="e", rollouts=rollouts).zero_variance
    assert Group(id="g", index=0, env="e", rollouts=(rollouts[0], rollouts[0])).zero_variance
    with pytest.raises(ValueError, match="discount must be at least 0 and at most 1"):
        TurnReturns(discount=1.5)
