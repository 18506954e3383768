"""Every reward keeps the promises of rewards/base.py. A new file is found by itself and needs an entry in CASES."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem.rewards
from tandem.config import registry
from tandem.rewards.base import Reward
from tandem.rewards.number import Number
from tandem.rollout.gold import gold_rollout
from tandem.types import Message, Task

CHAIN_SUM = {
    "task": "chain_sum",
    "config": {},
    "question": "4 + 3 =",
    "metadata": {"expression": "4 + 3"},
    "unsolved": False,
}

SUMS = {"tests": [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}]}
ADD = "print(sum(map(int, input().split())))"

CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "code_tests": ({}, ADD, SUMS, f"```python\n{ADD}\n```"),
    "cosine_length": ({"accuracy": Number(), "max_tokens": 8}, "7", {}, "7"),
    "countdown": ({}, "(3 + 5) * 8", {"numbers": [3, 5, 8], "target": 64}, "<answer>(3 + 5) * 8</answer>"),
    "exact": ({}, "Paris", {}, "Paris"),
    "format": ({"tags": ("think", "answer")}, "", {}, "<think>hm</think><answer>7</answer>"),
    "function": ({"path": "tandem.rewards.repetition.Repetition"}, "", {}, "7"),
    "length": ({"target": 4}, "", {}, "7"),
    "math_verify": ({"timeout_seconds": 1}, "#### 18", {}, "So 9 + 9 = 18.\n#### 18"),
    "number": ({}, "18", {}, "It is 18."),
    "overlong": ({"max_tokens": 8, "cache": 4}, "", {}, "7"),
    "reasoning_gym": ({}, "7", CHAIN_SUM, "4 + 3 = 7"),
    "repetition": ({}, "", {}, "7"),
}
"""Options, gold answer, meta and gold reply, by file name."""

APART: dict[str, dict[str, Any]] = {
    "environment": {"metric": "score"},
    "judge": {"url": "http://127.0.0.1:9/v1", "model": "m"},
    "reward_model": {"model": "nowhere"},
}
"""Options of rewards that need a server, a model or an environment; other tests have one for each."""

REPLIES = [
    "",
    " ",
    "\n\n",
    "no",
    "7" * 5000,
    "9^9^9^9",
    "((((((",
    "<answer>",
    "</answer><answer>",
    "½ ０ 𝟕 −3 €",
    "\x00",
    "-",
    ".",
    "$",
    "####",
]
"""What a policy may say."""

KINDS = registry.names("rewards")


def part(kind: str) -> type[Any]:
    module = importlib.import_module(f"tandem.rewards.{kind}")
    public = [
        thing
        for name, thing in vars(module).items()
        if dataclasses.is_dataclass(thing)
        and isinstance(thing, type)
        and thing.__module__ == module.__name__
        and name[0] != "_"
    ]
    assert len(public) == 1, f"{module.__name__} must define one public dataclass, found {public}"
    return public[0]


@pytest.fixture(params=[kind for kind in KINDS if kind not in APART])
def kind(request: pytest.FixtureRequest) -> str:
    assert request.param in CASES, f"add a case of {request.param} to CASES"
    return str(request.param)


@pytest.fixture
def reward(kind: str) -> Reward:
    reward = part(kind)(**CASES[kind][0])
    assert isinstance(reward, Reward)
    reward.prepare()
    return reward


@pytest.fixture
def task(kind: str) -> Task:
    _, answer, meta, _ = CASES[kind]
    return Task(id="t", env="e", prompt=(Message(role="user", content="?"),), answer=answer, meta=meta)


def test_pickles_and_is_frozen(reward: Reward) -> None:
    assert pickle.loads(pickle.dumps(reward)) == reward
    with pytest.raises(dataclasses.FrozenInstanceError):
        reward.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", sorted(APART))
def test_those_apart_pickle_and_are_frozen_too(kind: str) -> None:
    test_pickles_and_is_frozen(part(kind)(**APART[kind]))


def test_gold_reply_gets_full_marks(kind: str, reward: Reward, task: Task) -> None:
    value = reward(gold_rollout(task, CASES[kind][3]))
    assert value is not None
    assert math.isfinite(value)
    if reward.full_marks is not None:
        assert value == reward.full_marks


@pytest.mark.slow
@pytest.mark.parametrize("reply", REPLIES)
def test_any_reply_gets_a_finite_number_and_no_full_marks(reward: Reward, task: Task, reply: str) -> None:
    rollout = gold_rollout(task, reply)
    value = reward(rollout)
    assert isinstance(value, float)
    assert math.isfinite(value)
    assert reward(rollout) == value
    if reward.full_marks is not None:
        assert value < reward.full_marks


@pytest.mark.slow
def test_nothing_imports_torch() -> None:
    program = (
        f"import sys, importlib\nfor kind in {KINDS!r}: importlib.import_module('tandem.rewards.' + kind)\n"
        "import tandem.rewards.grading.workers\n"
        "heavy = {'torch', 'transformers', 'datasets', 'reasoning_gym', 'math_verify'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    source = str(Path(tandem.rewards.__path__[0]).parents[1])
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": source}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
