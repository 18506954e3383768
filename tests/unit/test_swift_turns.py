"""ms-swift's multi-turn schedulers, as its documents have plug-ins write them."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.compat_cases import forget_swift, swift_package

from tandem.errors import ConfigError, EnvError
from tandem.types import Message
from tandem_compat.swift.schedulers import ScheduledDataset

PLUGIN = """
from swift.plugin import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

class Retry(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": f"No. Try {current_turn + 1}."})
        return {"infer_request": infer_request, "rollout_infos": {"tries": current_turn, "note": "again"}}

    def check_finished(self, infer_request, response_choice, current_turn):
        if infer_request.data_dict["solution"] in response_choice.message.content:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

class Told(Retry):
    async def on_turn_end(self, infer_request, response_choice, current_turn):
        return {"done": True, "rollout_infos": {"score": 0.5}}

class Tips(Retry):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages[-1]["content"] += " But wait,"
        return {"infer_request": infer_request}

class Masks(Retry):
    def step(self, infer_request, response_choice, current_turn):
        result = super().step(infer_request, response_choice, current_turn)
        return {**result, "response_token_ids": [1, 2], "response_loss_mask": [1, 0]}

class Silent(Retry):
    def step(self, infer_request, response_choice, current_turn):
        return {"infer_request": infer_request}

class Runs(MultiTurnScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        return []

for one in (Retry, Told, Tips, Masks, Silent, Runs):
    multi_turns[one.__name__.lower()] = one
orms["length"] = lambda completions, rollout_infos, **_: [info["num_turns"] for info in rollout_infos]
"""


@dataclass
class Talk:
    """A conversation with a policy that says what it is told to."""

    answers: list[str]
    history: list[Message] = field(default_factory=lambda: [Message(role="user", content="1+2=")])

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self.history)

    @property
    def open(self) -> bool:
        return bool(self.answers)

    async def reply(self) -> Message:
        self.history.append(Message(role="assistant", content=self.answers.pop(0)))
        return self.history[-1]

    def add(self, *messages: Message) -> None:
        self.history.extend(messages)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forget_swift(monkeypatch)
    swift_package(tmp_path)
    Path("turns.py").write_text(PLUGIN)
    Path("d.jsonl").write_text(json.dumps({"query": "1+2=", "solution": "3"}) + "\n")


def scheduled(name: str, **options: Any) -> ScheduledDataset:
    return ScheduledDataset(path="d.jsonl", test_share=0.0, scheduler=name, files=("turns.py",), **options)


def played(name: str, *answers: str, **options: Any) -> tuple[list[tuple[str, str]], dict[str, float]]:
    env, talk = scheduled(name, **options), Talk(list(answers))
    (task,) = env.tasks("train")
    metrics = asyncio.run(env.play(task, talk))  # type: ignore[arg-type]
    return [(message.role, message.content) for message in talk.history[1:]], dict(metrics)


def test_a_conversation_goes_on_until_the_scheduler_has_enough() -> None:
    replies, metrics = played("retry", "4", "5", "3", "9")
    assert replies == [
        ("assistant", "4"),
        ("user", "No. Try 2."),
        ("assistant", "5"),
        ("user", "No. Try 3."),
        ("assistant", "3"),
    ]
    assert metrics == {"tries": 2.0, "num_turns": 3.0}


def test_it_ends_after_so_many_turns_or_when_the_policy_cannot_go_on() -> None:
    assert played("retry", "4", "5", "6", max_turns=2)[1] == {"tries": 1.0, "num_turns": 2.0}
    assert played("retry", "4", "5")[1]["num_turns"] == 2.0
    assert played("told", "4", "5") == ([("assistant", "4")], {"score": 0.5, "num_turns": 1.0})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tips", "changes what was said before"),
        ("masks", "masks what was sampled"),
        ("silent", "says nothing after the policy's answer"),
    ],
)
def test_what_was_sampled_is_trained_as_it_was(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        played(name, "4", "5")


def test_a_scheduler_that_is_not_there_is_told_before_anything_is_played() -> None:
    with pytest.raises(EnvError, match="no file registers scheduler 'other'; in multi_turns: masks, retry"):
        scheduled("other").tasks("train")
    with pytest.raises(EnvError, match="has a run of its own"):
        scheduled("runs").tasks("train")
    with pytest.raises(ConfigError, match="files must name"):
        ScheduledDataset(path="d.jsonl", test_share=0.0, scheduler="s", files=())


def test_it_travels_to_other_processes() -> None:
    env = scheduled("retry")
    env.tasks("train")
    assert pickle.loads(pickle.dumps(env)) == env
