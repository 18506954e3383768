"""Gold replies against graders: a broken reward is found, a right one is not suspected."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tandem.envs.base import Environment, Split
from tandem.rewards.base import Reward
from tandem.rewards.cosine_length import CosineLength
from tandem.rewards.exact import ExactReward
from tandem.rewards.format import Format
from tandem.rewards.grading.workers import Graders
from tandem.rewards.math_verify import MathVerify
from tandem.rewards.number import Number
from tandem.rewards.overlong import Overlong
from tandem.rollout.gold import GoldFailure, check_environment, gold_rollout
from tandem.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class Few(Environment):
    """Three tasks; the gold replies are given."""

    replies: tuple[str | None, ...]
    gold: tuple[str, ...] = ("7", "8", "9")

    def tasks(self, split: Split) -> Sequence[Task]:
        return [
            Task(id=f"t{n}", env="few", prompt=(Message(role="user", content="?"),), answer=answer, meta={"n": n})
            for n, answer in enumerate(self.gold)
        ]

    def check(self, task: Task) -> str | None:
        return self.replies[task.meta["n"]]


def failures(env: Environment, specs: Mapping[str, tuple[Reward | str, float]], tasks: int = 3) -> list[GoldFailure]:
    async def go() -> list[GoldFailure]:
        async with Graders(specs) as graders:
            return await check_environment(env, graders, tasks)

    return asyncio.run(go())


def test_right_answers_pass_and_rewards_without_full_marks_are_not_asked() -> None:
    env = Few(replies=("It is 7", "8.", "#### 9"))
    assert failures(env, {"number": (Number(), 1.0), "overlong": (Overlong(max_tokens=500, cache=9), 0.1)}) == []


def test_reward_that_refuses_a_gold_reply_is_named() -> None:
    env = Few(replies=("7", "It is 8", "9"))
    (failure,) = failures(env, {"number": (Number(), 1.0), "exact": (ExactReward(), 0.5)})
    assert (failure.task, failure.reward) == ("t1", "exact")
    assert str(failure) == "task t1: reward 'exact' gives the gold reply 0, expected 1 ('It is 8')"


@pytest.mark.parametrize(
    "rewards",
    [
        [Number(after="####")],
        [Number(after="####"), Format(tags=("think", "answer"))],
        [Format(tags=("think", "answer")), MathVerify()],
        [MathVerify(least_working=20), Format(tags=("answer", "confidence"))],
        [MathVerify(marker="", least_working=20)],
        [MathVerify(), Format(pattern="^<think>")],
        [
            CosineLength(accuracy=Number(after="####"), max_tokens=9),
            ExactReward(tag="city"),
            Format(tags=("think", "city")),
        ],
    ],
)
def test_a_gold_answer_is_judged_in_the_form_that_rewards_ask_for(rewards: list[Reward]) -> None:
    env = Few(replies=("7", "8", "9"))
    assert failures(env, {str(n): (reward, 1.0) for n, reward in enumerate(rewards)}) == []


def test_rewards_that_no_reply_satisfies_together_are_named() -> None:
    env = Few(replies=("7", "8", "9"))
    (failure, *_) = failures(env, {"exact": (ExactReward(), 1.0), "form": (Format(tags=("answer",)), 1.0)})
    assert str(failure) == "task t0: reward 'exact' gives the gold reply 0, expected 1 ('<answer>\\n7\\n</answer>')"


def test_a_whole_gold_reply_is_judged_by_its_form() -> None:
    (failure,) = failures(Few(replies=("7.", "8.", "9.")), {"form": (Format(tags=("answer",)), 1.0)}, tasks=1)
    assert failure.reward == "form"


def test_grading_error_is_a_failure() -> None:
    (failure,) = failures(Few(replies=("7", "8", "9"), gold=("seven", "8", "9")), {"number": (Number(), 1.0)})
    assert failure.task == "t0"
    assert "holds no number" in str(failure)


def test_only_the_first_tasks_are_checked() -> None:
    assert failures(Few(replies=("7", "wrong", "wrong")), {"number": (Number(), 1.0)}, tasks=1) == []


def test_tasks_without_a_gold_reply_are_not_judged() -> None:
    assert failures(Few(replies=(None, "8", None)), {"number": (Number(), 1.0)}) == []
    assert len(failures(Few(replies=(None, "wrong", None)), {"number": (Number(), 1.0)})) == 1


def test_gold_rollout_is_a_finished_turn() -> None:
    task = Few(replies=()).tasks("train")[0]
    rollout = gold_rollout(task, "7")
    assert rollout.text == "7"
    assert rollout.num_tokens == 1
    assert not rollout.truncated
