"""The same answer is scored once, by rewards that cannot tell one from the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.registry import find, names
from tandem.metrics import flatten
from tandem.rewards.base import Reward
from tandem.rewards.grading.workers import Graders
from tandem.types import Completion, Finish, Message, Rollout, Task, Turn

PARTS = """
import dataclasses
from dataclasses import dataclass
from typing import ClassVar
from tandem.rewards.base import GroupReward, Reward

@dataclass(frozen=True, kw_only=True)
class Asked(Reward):
    file: str
    def __call__(self, rollout):
        with open(self.file, "a") as out:
            out.write(rollout.id + "\\n")
        if rollout.text == "raise":
            raise ValueError("no")
        return None if rollout.text == "none" else float(len(rollout.text))

@dataclass(frozen=True, kw_only=True)
class Pure(Asked):
    pure: ClassVar[bool] = True

@dataclass(frozen=True, kw_only=True)
class Alone(Pure):
    alone: ClassVar[bool] = True

@dataclass(frozen=True, kw_only=True)
class Together(GroupReward):
    file: str
    pure: ClassVar[bool] = True
    def scores(self, rollouts):
        with open(self.file, "a") as out:
            out.write(" ".join(rollout.id for rollout in rollouts) + "\\n")
        return [float(len(rollout.text)) for rollout in rollouts]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def rollout_of(number: int, *turns: str, finish: Finish = "stop", reply: str = "go on", **metrics: float) -> Rollout:
    task = Task(id="t", env="e", prompt=(Message(role="user", content="?"),), answer="")
    made = []
    messages = list(task.prompt)
    for at, text in enumerate(turns):
        tokens = tuple(text.encode())
        sampled = Completion(tokens=tokens, logprobs=(-0.1 * number,) * len(tokens), versions=(number,) * len(tokens),
                             finish=finish)  # fmt: skip
        answer = (Message(role="user", content=reply),) if at + 1 < len(turns) else ()
        made.append(Turn(prompt=(1,), completion=sampled, temperature=1.0, reply=answer))
        messages += [Message(role="assistant", content=text), *answer]
    return Rollout(
        id=f"t@0/{number}", task=task, turns=tuple(made), messages=tuple(messages), status="ok", metrics=metrics
    )


def graded(rollouts: list[Rollout], **kinds: str) -> tuple[list[Rollout], Mapping[str, float], dict[str, list[str]]]:
    """Marks, counts, and which rollouts each reward was asked about."""
    specs: dict[str, Any] = {name: (find("rewards", kind)(file=name), 1.0) for name, kind in kinds.items()}

    async def go() -> tuple[list[Rollout], Mapping[str, float]]:
        async with Graders(specs) as graders:
            return await graders.grade(rollouts), flatten(graders.metrics())

    marked, counts = asyncio.run(go())
    return marked, counts, {name: Path(name).read_text().split() for name in kinds}


def test_the_same_answer_is_scored_once_and_earns_the_same() -> None:
    rollouts = [rollout_of(0, "ab"), rollout_of(1, "abc"), rollout_of(2, "ab"), rollout_of(3, "ab")]
    marked, counts, graded_ids = graded(rollouts, p="asked_parts:Pure")
    assert graded_ids == {"p": ["t@0/0", "t@0/1"]}
    assert [(one.id, one.reward, one.rewards) for one in marked] == [
        (f"t@0/{n}", value, {"p": value}) for n, value in enumerate((2.0, 3.0, 2.0, 2.0))
    ]
    assert counts["grading/reused"] == 2
    assert [one.turns for one in marked] == [one.turns for one in rollouts], "each keeps its own logprobs"


def test_a_reward_that_does_not_say_it_is_pure_is_asked_each_time() -> None:
    _, counts, graded_ids = graded([rollout_of(0, "ab"), rollout_of(1, "ab")], a="asked_parts:Asked")
    assert graded_ids == {"a": ["t@0/0", "t@0/1"]}
    assert "grading/reused" not in counts


@pytest.mark.slow
def test_rewards_of_one_process_are_asked_alike() -> None:
    """A pure one beside one that is not; but what has a process of its own is by itself."""
    _, counts, graded_ids = graded(
        [rollout_of(0, "ab"), rollout_of(1, "ab")], a="asked_parts:Asked", p="asked_parts:Pure", o="asked_parts:Alone"
    )
    assert graded_ids == {"a": ["t@0/0", "t@0/1"], "p": ["t@0/0", "t@0/1"], "o": ["t@0/0"]}
    assert counts["grading/reused"] == 1


def test_a_function_of_the_group_gets_each_answer_once() -> None:
    marked, _, graded_ids = graded(
        [rollout_of(0, "ab"), rollout_of(1, "ab"), rollout_of(2, "c")], t="asked_parts:Together"
    )
    assert graded_ids == {"t": ["t@0/0", "t@0/2"]}
    assert [one.reward for one in marked] == [2.0, 2.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        rollout_of(1, "ab", finish="length"),
        rollout_of(1, "ab", solved=1.0),
        rollout_of(1, "a", "b"),
        replace(rollout_of(1, "ab"), messages=(*rollout_of(1, "ab").messages, Message(role="user", content="!"))),
    ],
    ids=["cut", "another metric", "in two turns", "another message"],
)
def test_whatever_a_reward_may_look_at_makes_it_another(other: Rollout) -> None:
    _, counts, graded_ids = graded([rollout_of(0, "ab"), other], p="asked_parts:Pure")
    assert graded_ids == {"p": ["t@0/0", "t@0/1"]}
    assert "grading/reused" not in counts


def test_what_the_environment_replied_makes_it_another() -> None:
    _, _, graded_ids = graded(
        [rollout_of(0, "a", "b"), rollout_of(1, "a", "b", reply="no"), rollout_of(2, "a", "b")], p="asked_parts:Pure"
    )
    assert graded_ids == {"p": ["t@0/0", "t@0/1"]}


def test_none_and_failures_are_shared() -> None:
    rollouts = [
        rollout_of(0, "none"),
        rollout_of(1, "raise"),
        rollout_of(2, "none"),
        rollout_of(3, "raise"),
        rollout_of(4, "ab"),
    ]
    marked, counts, graded_ids = graded(rollouts, p="asked_parts:Pure")
    assert graded_ids == {"p": ["t@0/0", "t@0/1", "t@0/4"]}
    assert [one.reward for one in marked] == [None, None, None, None, 2.0]
    assert [one.status for one in marked] == ["ok", "error", "ok", "error", "ok"]
    assert counts["grading/failed_raised"] == 2, "each of them is a rollout that failed"


def test_rewards_of_the_tree_that_draw_or_ask_are_not_pure() -> None:
    impure = {kind for kind in names("rewards") if issubclass(part := find("rewards", kind), Reward) and not part.pure}
    assert {"judge", "function", "cosine_length"} == impure
