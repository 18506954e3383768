"""Every environment keeps the promises of envs/base.py. A new file is found by itself and needs an entry in OPTIONS."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tandem.envs
from tandem.config import registry
from tandem.envs.base import Environment
from tandem.rewards.base import Reward
from tandem.rewards.grading.workers import Graders
from tandem.rollout.gold import check_environment
from tandem.types import Message

GSM8K_ROWS = [
    {
        "question": f"Tom has {n} eggs and buys {n} more. How many?",
        "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}",
    }
    for n in range(1000, 1030)
]
DATASET_ROWS = [{"prompt": f"Say {n}.", "answer": f"{n}", "level": n % 3} for n in range(30)]

OPTIONS: dict[str, dict[str, Any]] = {
    "agent": {"path": "{dataset}", "agent": "true"},
    "arithmetic": {"max_number": 5},
    "calculator": {"size": 60},
    "countdown": {"size": 60},
    "dataset": {"path": "{dataset}"},
    "gsm8k": {"path": "{gsm8k}"},
    "reasoning_gym": {
        "task": "chain_sum",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "size": 60,
    },
}
"""Options of a small instance, by file name."""

REWARDS = {"agent": {"exact": 1.0}, "dataset": {"exact": 1.0}}
"""Rewards of environments that have none of their own."""

PACKAGES = ("gymnasium", "mcp", "openenv", "textarena", "verifiers")
KINDS = [kind for kind in registry.names("envs") if kind not in PACKAGES]
"""All but those that need an interpreter of their own: tests/integration/test_packages.py and test_verifiers.py."""


def part(category: str, kind: str) -> type[Any]:
    module = importlib.import_module(f"{registry.CATEGORIES[category]}.{kind}")
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


def rewards_of(kind: str, env: Environment) -> dict[str, tuple[Reward, float]]:
    specs = {}
    for name, spec in (REWARDS.get(kind) or dict(env.default_rewards)).items():
        options = dict(spec) if isinstance(spec, dict) else {"weight": spec}
        weight = options.pop("weight")
        specs[name] = (part("rewards", options.pop("kind", name))(**options), weight)
    return specs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    files = {"gsm8k": GSM8K_ROWS, "dataset": DATASET_ROWS}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {f"{{{name}}}": str(folder / f"{name}.jsonl") for name in files}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    assert request.param in OPTIONS, f"add options of a small {request.param} to OPTIONS"
    return str(request.param)


@pytest.fixture
def env(kind: str, data: dict[str, str]) -> Environment:
    return make(kind, data)


def make(kind: str, data: dict[str, str]) -> Environment:
    options = {k: data.get(v, v) if isinstance(v, str) else v for k, v in OPTIONS[kind].items()}
    return part("envs", kind)(**options)  # type: ignore[no-any-return]


def test_is_a_frozen_part_named_after_its_file(kind: str, env: Environment) -> None:
    assert isinstance(env, Environment)
    assert env.name == kind
    assert pickle.loads(pickle.dumps(env)) == env
    with pytest.raises(dataclasses.FrozenInstanceError):
        env.anything = 1  # type: ignore[attr-defined]


@pytest.mark.slow
def test_tasks_are_unique_and_the_same_every_time(kind: str, env: Environment, data: dict[str, str]) -> None:
    tasks = [*env.tasks("train"), *env.tasks("test")]
    assert len({task.id for task in tasks}) == len(tasks)
    assert {task.env for task in tasks} == {kind}
    assert all(task.prompt and task.prompt[-1].role == "user" for task in tasks)
    again = make(kind, data)
    assert [*again.tasks("train"), *again.tasks("test")] == tasks
    assert [*env.tasks("train")] == tasks[: len(env.tasks("train"))]


@pytest.mark.slow
def test_splits_share_no_question(env: Environment) -> None:
    train, test = env.tasks("train"), env.tasks("test")
    assert len(train) > len(test) > 0
    assert not {task.prompt for task in train} & {task.prompt for task in test}


def test_meta_is_json(env: Environment) -> None:
    for task in [*env.tasks("train")[:5], *env.tasks("test")[:5]]:
        json.dumps(task.meta)


@pytest.mark.slow
def test_gold_replies_get_full_marks(kind: str, env: Environment) -> None:
    async def failures() -> list[str]:
        async with Graders(rewards_of(kind, env)) as graders:
            assert any(full is not None for full in graders.full_marks.values())
            return [str(failure) for failure in await check_environment(env, graders, 20)]

    assert asyncio.run(failures()) == []


class Scripted:
    """A chat whose policy says one thing again and again."""

    def __init__(self, prompt: tuple[Message, ...], line: str) -> None:
        self.messages = prompt
        self.open = True
        self.line = line
        self.spoken = 0

    async def reply(self) -> Message:
        assert self.messages[-1].role != "assistant", "the policy must not speak twice in a row"
        self.spoken += 1
        assert self.spoken < 100, "the environment never ends"
        message = Message(role="assistant", content=self.line)
        self.messages = (*self.messages, message)
        return message

    def add(self, *messages: Message) -> None:
        assert self.open
        self.messages = (*self.messages, *messages)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """As if a program had asked once."""
        await self.reply()
        yield "http://nowhere"


def test_play_ends_on_the_gold_reply(env: Environment) -> None:
    task = env.tasks("train")[0]
    gold = env.check(task)
    assert gold is not None
    chat = Scripted(task.prompt, gold)
    metrics = asyncio.run(env.play(task, chat))
    assert chat.spoken == 1
    assert chat.messages[-1].content == gold
    assert all(isinstance(value, float) for value in metrics.values())


def test_nothing_imports_torch() -> None:
    program = (
        f"import sys, importlib\nfor kind in {KINDS!r}: importlib.import_module('tandem.envs.' + kind)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'reasoning_gym', 'math_verify'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    source = str(Path(tandem.envs.__path__[0]).parents[1])
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": source}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
