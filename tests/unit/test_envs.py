"""Environments that make their tasks themselves."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.envs.arithmetic import Arithmetic
from tandem.envs.calculator import Calculator
from tandem.envs.countdown import Countdown
from tandem.envs.reasoning_gym import ReasoningGym
from tandem.errors import ConfigError, EnvError
from tandem.expression import evaluate
from tandem.types import Message

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


# arithmetic


def test_arithmetic_poses_every_sum_once() -> None:
    env = Arithmetic(operators=("+", "-"), max_number=4)
    tasks = [*env.tasks("train"), *env.tasks("test")]
    assert len(tasks) == 4 * 4 * 2
    assert {task.meta["expression"] for task in tasks} == {
        f"{a} {op} {b}" for a in range(1, 5) for b in range(1, 5) for op in "+-"
    }
    for task in tasks:
        left, op, right = task.meta["expression"].split()
        assert int(task.answer) == (int(left) + int(right) if op == "+" else int(left) - int(right))
        assert task.prompt == (Message(role="user", content=f"What is {task.meta['expression']}?"),)


def test_arithmetic_obeys_precedence() -> None:
    tasks = Arithmetic(operators=("+", "*"), terms=3, max_number=3, test_share=0.0).tasks("train")
    by_expression = {task.meta["expression"]: task.answer for task in tasks}
    assert by_expression["2 + 3 * 2"] == "8"
    assert by_expression["3 * 3 + 1"] == "10"


def test_arithmetic_question_stays_in_its_split_whatever_the_options() -> None:
    def expressions(env: Arithmetic, split: Any) -> set[str]:
        return {task.meta["expression"] for task in env.tasks(split)}

    small, large = Arithmetic(max_number=6), Arithmetic(max_number=9, seed=5, prompt="{expression}=")
    assert not expressions(small, "train") & expressions(large, "test")
    assert not expressions(small, "test") & expressions(large, "train")


def test_arithmetic_worked_examples_are_turns_and_are_not_posed() -> None:
    env = Arithmetic(examples=2, system="Be brief.", instruction="Only the number.")
    task = env.tasks("train")[0]
    assert [m.role for m in task.prompt] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert task.prompt[1].content.endswith("?\nOnly the number.")
    shown = task.prompt[1].content
    expression, _, answer = task.prompt[2].content.partition(" = ")
    assert (expression, evaluate(expression).value) == (shown.removeprefix("What is ").partition("?")[0], int(answer))
    for split in ("train", "test"):
        assert all(task.prompt[-1].content != shown for task in env.tasks(split))  # type: ignore[arg-type]
    assert env.check(task) == f"{task.meta['expression']} = {task.answer}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operators": ("/",)}, "operators must be"),
        ({"operators": ()}, "operators must be"),
        ({"min_number": 5, "max_number": 4}, "min_number must be"),
        ({"terms": 1}, "terms must be"),
        ({"terms": 10**30}, "terms must be at least 2 and at most 60"),
        ({"prompt": "What?"}, "prompt must contain"),
        ({"test_share": 1.0}, "test_share must be"),
        ({"size": 0}, "size must be"),
        ({"terms": 9, "max_number": 999}, "10\\^18"),
    ],
)
def test_arithmetic_refuses_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arithmetic(**options)


# countdown


@pytest.mark.parametrize("use_all", [True, False])
def test_countdown_puzzles_are_solved_by_their_answers(use_all: bool) -> None:
    env = Countdown(size=200, use_all=use_all, max_number=20)
    tasks = [*env.tasks("train"), *env.tasks("test")]
    assert len(tasks) == 200
    for task in tasks:
        solved = evaluate(task.answer, "+-*/")
        assert solved.value == task.meta["target"]
        assert Counter(map(int, solved.numbers)) == Counter(task.meta["numbers"])
        assert 3 <= len(task.meta["numbers"]) <= 4
        assert str(task.meta["target"]) in task.prompt[-1].content
    wording = "exactly once" if use_all else "at most once"
    assert wording in tasks[0].prompt[-1].content
    assert env.default_rewards == {"countdown": {"weight": 1.0, "use": "all" if use_all else "some"}}


def test_countdown_refuses_options_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="min_numbers must be"):
        Countdown(min_numbers=5)
    with pytest.raises(ConfigError, match="operators must be"):
        Countdown(operators=("%",))


# calculator


class Scripted:
    """A chat whose policy says the given lines; it is cut after ``cut`` of them."""

    def __init__(self, prompt: Sequence[Message], lines: Sequence[str], cut: int | None = None) -> None:
        self.messages = tuple(prompt)
        self.open = True
        self._lines = list(lines)
        self._cut = cut

    async def reply(self) -> Message:
        assert self.open
        message = Message(role="assistant", content=self._lines.pop(0))
        self.messages = (*self.messages, message)
        if self._cut is not None:
            self._cut -= 1
            self.open = self._cut > 0
        return message

    def add(self, *messages: Message) -> None:
        assert self.open
        self.messages = (*self.messages, *messages)


def play(env: Calculator, *lines: str, cut: int | None = None) -> tuple[list[tuple[str, str]], dict[str, float]]:
    task = env.tasks("train")[0]
    chat = Scripted(task.prompt, lines, cut)
    metrics = asyncio.run(env.play(task, chat))
    return [(m.role, m.content) for m in chat.messages[len(task.prompt) :]], dict(metrics)


def test_calculator_answers_a_call() -> None:
    messages, metrics = play(Calculator(), "Let me see <calc>12*34</calc>", "It is 408.", "never said")
    assert messages == [
        ("assistant", "Let me see <calc>12*34</calc>"),
        ("user", "<result>408</result>"),
        ("assistant", "It is 408."),
    ]
    assert metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_calculator_mistake_becomes_a_reply() -> None:
    messages, metrics = play(Calculator(), "<calc>1/0</calc>", "<calc>import os</calc>", "Hm. 3")
    assert messages[1] == ("user", "<error>division by zero</error>")
    assert messages[3][1].startswith("<error>only numbers")
    assert metrics == {"tool_calls": 2.0, "tool_errors": 2.0}


# reasoning-gym


def test_gym_chain_sum_gives_every_question_once() -> None:
    env = ReasoningGym(task="chain_sum", config=ONE_DIGIT, size=150)
    train, test = env.tasks("train"), env.tasks("test")
    assert len(train) + len(test) == 150
    assert 15 < len(test) < 50
    assert env.check(train[0]) == train[0].answer
    assert train[0].prompt[0].content.startswith("State the final answer")
    assert train[0].meta["task"] == "chain_sum"


@pytest.mark.slow
def test_gym_unknown_task_is_told_with_those_there_are() -> None:
    with pytest.raises(EnvError, match=r"no task 'chain_sun'; it has: .*chain_sum"):
        ReasoningGym(task="chain_sun").tasks("train")


def test_gym_bad_config_lists_the_options() -> None:
    with pytest.raises(EnvError, match=r"refuses config.*min_term.*its options: min_terms, max_terms"):
        ReasoningGym(task="chain_sum", config={"min_term": 2}).tasks("train")
    with pytest.raises(EnvError, match="max_terms must be >= min_terms"):
        ReasoningGym(task="chain_sum", config={"min_terms": 9, "max_terms": 2}).tasks("train")
    with pytest.raises(ConfigError, match="config must not set seed"):
        ReasoningGym(task="chain_sum", config={"seed": 1})


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvError, match=r"tandem-rl\[reasoning-gym\]"):
        ReasoningGym(task="gsm_symbolic").tasks("train")
