"""What every advantage keeps, whatever its formula."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tandem.algorithms.advantages.base import Advantage, advantages
from tandem.algorithms.advantages.maxrl import MaxRl
from tandem.config.registry import find, names
from tandem.types import Completion, Group, Rollout, Task, Turn


@pytest.fixture(params=names("advantages"))
def advantage(request: pytest.FixtureRequest) -> Advantage:
    return find("advantages", request.param)()  # type: ignore[no-any-return]


def group(*rewards: float | None) -> Group:
    task = Task(id="t", env="e", prompt=(), answer="")
    completion = Completion(tokens=(1,), logprobs=(-1.0,), versions=(0,), finish="stop")
    turn = Turn(prompt=(0,), completion=completion, temperature=1.0)
    rollouts = tuple(
        Rollout(id=f"g/{i}", task=task, turns=(turn,), messages=(), status="ok", rewards={"r": r or 0.0}, reward=r)
        for i, r in enumerate(rewards)
    )
    return Group(id="g", index=0, env="e", rollouts=rollouts)


def test_one_number_per_scored_rollout(advantage: Advantage) -> None:
    assert len(advantage(group(1.0, None, 0.0, 2.0))) == 3
    assert advantage(group()) == []
    assert advantage(group(None, None)) == []


def test_without_siblings_there_is_nothing_to_be_better_than(advantage: Advantage) -> None:
    assert advantage(group(3.0)) == [0.0]
    assert advantage(group(None, 3.0)) == [0.0]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e6, -1e6])
@pytest.mark.parametrize("num", [3, 6, 7])
def test_equal_rewards_teach_nothing(advantage: Advantage, reward: float, num: int) -> None:
    """Exactly nothing, though their mean may be rounded: samples whose advantage is 0 are not computed."""
    if isinstance(advantage, MaxRl) and reward < 0:
        pytest.skip("its mean is that of successes; it refuses negative rewards")
    flat = group(*[reward] * num)
    assert advantage(flat) == [0.0] * num
    assert advantages(advantage, [flat, group(0.0, 0.1, 0.7)])[0] == [0.0] * num


def test_over_a_step_every_group_keeps_its_place(advantage: Advantage) -> None:
    """Groups of every size, one of failed siblings alone, and what each got: as many numbers, of the same signs."""
    groups = [group(0.0, 1.0, 0.3), group(None, 2.0), group(None), group(0.0, 0.25, 0.5, 2.0), group()]
    computed = advantages(advantage, groups)
    assert [len(mine) for mine in computed] == [3, 1, 0, 4, 0]
    assert all(math.isfinite(value) for mine in computed for value in mine)
    alone = [advantage(each) for each in groups]
    for mine, before in zip(computed, alone, strict=True):
        assert [a > 0 for a in mine if abs(a) > 1e-9] == [b > 0 for b in before if abs(b) > 1e-9]
    assert advantages(advantage, []) == []


def test_better_siblings_get_more(advantage: Advantage) -> None:
    values = advantage(group(0.0, 0.25, 0.5, 2.0))
    assert values == sorted(values)
    assert values[0] < 0 < values[-1]
    assert all(math.isfinite(value) for value in values)


def test_order_of_siblings_does_not_matter(advantage: Advantage) -> None:
    forward, backward = advantage(group(0.0, 1.0, 0.3)), advantage(group(0.3, 1.0, 0.0))
    assert backward[::-1] == pytest.approx(forward, rel=1e-12)


def test_baseline_takes_out_what_all_siblings_share(advantage: Advantage) -> None:
    values = advantage(group(0.0, 1.0, 0.3, 0.9))
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", names("advantages"))
def test_it_needs_no_torch(kind: str) -> None:
    """Environment workers compute nothing with tensors and should start at once."""
    code = f"import sys, tandem.algorithms.advantages.{kind}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
