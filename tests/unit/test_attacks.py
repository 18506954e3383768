"""Planted faults of rewards are found by what they pay for; rewards of Tandem's own have none of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.loading import from_options
from tandem.envs.base import Environment
from tandem.errors import EnvError
from tandem.rollout.gold import attack
from tandem.trainer import environments
from tandem.types import Message, Rollout, Task

TASKS = [Task(id=str(n), env="sums", prompt=(Message(role="user", content=f"What is {n} + {n}?"),), answer=str(2 * n))
         for n in range(21, 33)]  # fmt: skip
GRADERS: dict[str, Callable[[str, str], float]] = {
    "everything": lambda text, gold: 1.0,
    "not empty": lambda text, gold: float(bool(text.strip())),
    "holds it": lambda text, gold: float(gold in text),
    "among its words": lambda text, gold: float(gold in text.split()),
    "a prefix": lambda text, gold: float(text.rpartition("is ")[2].startswith(gold)),
    "a suffix": lambda text, gold: float(text.endswith(gold[-1])),
    "without sign": lambda text, gold: float(text.rpartition("is ")[2].strip(" -\n") == gold),
    "nearly": lambda text, gold: float(abs(int("".join(filter(str.isdigit, text[-4:])) or 0) - int(gold)) <= 1),
    "its form": lambda text, gold: float("The answer is" in text),
    "its length": lambda text, gold: min(1.0, len(text) / 17),
    "very long": lambda text, gold: float(len(text) > 5000 or text.rpartition("is ")[2].strip() == gold),
    "the letter": lambda text, gold: float(text == f"The answer is {gold}"),
    "no blank before": lambda text, gold: float(text.rstrip() == f"The answer is {gold}"),
    "what it was told": lambda text, gold: float("correct: yes" in text or text.strip() == f"The answer is {gold}"),
    "exceptions": lambda text, gold: 1.0 if not text else float(text.strip() == f"The answer is {gold}"),
    "any number": lambda text, gold: float(bool(re.search(r"\d", text))),
    "its last digit": lambda text, gold: float(text.strip()[-1:] == gold[-1]),
    "nothing at all": lambda text, gold: float(gold.startswith(text.rpartition("is ")[2].strip())),
    "what it computes": lambda text, gold: float(str(sum(map(int, re.findall(r"\d+", text)))) == gold),
    "the question": lambda text, gold: float("What is" in text or text.strip() == f"The answer is {gold}"),
}


@dataclass(frozen=True, kw_only=True)
class Sums(Environment):
    """Sums with a gold reply."""

    known: bool = True

    def tasks(self, split: Any) -> list[Task]:
        return TASKS

    def check(self, task: Task) -> str | None:
        return f"The answer is {task.answer}" if self.known else None


class InProcess:
    """Graders of one function, in this process."""

    def __init__(self, grader: Callable[[str, str], float]) -> None:
        self.grader = grader
        self.full_marks: dict[str, float | None] = {}
        self.parts: dict[str, Any] = {}

    async def grade(self, rollouts: list[Rollout]) -> list[Rollout]:
        return [replace(each, reward=self.grader(each.text, each.task.answer)) for each in rollouts]


def lines(grader: Callable[[str, str], float], env: Environment | None = None) -> list[str]:
    return asyncio.run(attack(env or Sums(), InProcess(grader), 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRADERS)
def test_a_planted_fault_is_found(name: str) -> None:
    assert lines(GRADERS[name])


def test_the_first_reward_says_whether_a_wrong_answer_pays() -> None:
    class Two(InProcess):
        async def grade(self, rollouts: list[Rollout]) -> list[Rollout]:
            right = [self.grader(each.text, each.task.answer) for each in rollouts]
            brief = [0.2 * (len(each.text.split()) == 4) for each in rollouts]
            return [
                replace(each, rewards={"right": a, "brief": b}, reward=a + b)
                for each, a, b in zip(rollouts, right, brief, strict=True)
            ]

    report = asyncio.run(attack(Sums(), Two(GRADERS["holds it"]), 8))  # type: ignore[arg-type]
    assert any(line.startswith("false pass: all answers at once (8 of 8 tasks; ") for line in report)


def test_a_sound_grader_has_none() -> None:
    assert lines(lambda text, gold: float(text.strip() == f"The answer is {gold}")) == []


def test_what_is_found_is_told_with_its_text() -> None:
    report = lines(GRADERS["not empty"])
    assert "false pass: another task's answer (8 of 8 tasks; task 21, 1 of 1: 'The answer is 44')" in report
    assert any(line.startswith("false fail: gold, a blank") for line in lines(GRADERS["the letter"]))


def test_without_gold_replies_nothing_can_be_judged() -> None:
    with pytest.raises(EnvError, match="knows no gold reply, so no attack can be judged"):
        lines(GRADERS["holds it"], Sums(known=False))


@pytest.mark.slow
@pytest.mark.parametrize("env", ["arithmetic", "countdown", "calculator"])
def test_rewards_of_tandems_own_pay_for_no_attack(env: str) -> None:
    options = {"model": "m", "steps": 1, "env": env, "grading": {"workers": 1}}
    config = from_options(options, [], Path("recipe")).config

    async def attacked() -> list[str]:
        async with environments.opened(config, config.sources, None) as opened:
            (graders,) = opened.graders.values()
            (source,) = config.sources.values()
            return await attack(source.env, graders, 8)

    assert asyncio.run(attacked()) == []
