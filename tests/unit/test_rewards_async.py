"""Async rewards of a group go on side by side; pools keep slow and large rewards out of the others' way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.metrics import flatten
from tandem.observability import waits
from tandem.rewards.grading.workers import Graders
from tandem.rewards.number import Number
from tandem.rollout.gold import gold_rollout
from tandem.types import Message, Rollout, Task

pytestmark = pytest.mark.slow

MODULE = '''
import asyncio, os, time
from collections.abc import Sequence
from dataclasses import dataclass
from tandem.rewards.base import Failure, GroupReward, Reward

waiting, all_here = 0, None

async def meet(count):
    """Returns once that many calls wait at the same time: it never would, one after the other."""
    global waiting, all_here
    all_here = all_here or asyncio.Event()
    waiting += 1
    if waiting == count: all_here.set()
    await all_here.wait()

async def one_of_four(rollout):
    await meet(4)
    return float(os.getpid())
async def first(completions, **kwargs):
    await meet(2)
    return [1.0] * len(completions)
async def second(completions, **kwargs):
    await meet(2)
    return [2.0] * len(completions)

def text(rollout): return rollout.messages[-1].content
async def by_text(rollout):
    reply = text(rollout)
    if reply == "forever": await asyncio.Event().wait()
    if reply == "block": time.sleep(60)
    if reply == "die": os._exit(3)
    if reply == "raise": raise ValueError("no such luck")
    if reply == "stubborn":
        while True:
            try: await asyncio.sleep(60)
            except asyncio.CancelledError: pass
    return float(os.getpid())
def blocks(rollout):
    if text(rollout) == "block": time.sleep(60)
    return float(os.getpid())

@dataclass(frozen=True, kw_only=True)
class Large(GroupReward):
    """Stands for one with much memory."""
    @property
    def alone(self): return True
    @property
    def call_seconds(self): return 0.5
    def scores(self, rollouts):
        for r in rollouts:
            if text(r) == "slow": time.sleep(60)
        return [float(os.getpid()) for _ in rollouts]

@dataclass(frozen=True, kw_only=True)
class Fails(GroupReward):
    """Gives what it is told of every rollout that says so."""
    costs: str = "rollout"
    def scores(self, rollouts):
        return [Failure("away", "had no answer", self.costs) if text(r) == "ask" else 1.0 for r in rollouts]
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "async_graders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "async_graders", raising=False)
    import async_graders  # type: ignore[import-not-found]

    return async_graders


def group(*replies: str, id: str = "t@0") -> list[Rollout]:
    task = Task(id=id, env="e", prompt=(Message(role="user", content="?"),), answer="7")
    return [replace(gold_rollout(task, reply), id=f"{id}/{i}") for i, reply in enumerate(replies)]


@pytest.mark.parametrize(
    ("specs", "singly"),
    [
        ({"number": Number()}, True),
        ({"plain": "async_graders:blocks"}, True),
        ({"number": Number(), "group": "async_graders:first"}, False),
        ({"async": "async_graders:one_of_four"}, False),
    ],
    ids=str,
)
def test_answers_are_graded_singly_where_no_reward_takes_groups_or_is_async(specs: Any, singly: bool) -> None:
    async def go() -> bool:
        async with Graders({name: (spec, 1.0) for name, spec in specs.items()}) as graders:
            return graders.singly

    assert asyncio.run(go()) is singly


def graded(
    specs: Mapping[str, Any], rollouts: list[Rollout], timeout: float = 5.0, **options: Any
) -> tuple[list[Rollout], dict[str, float]]:
    async def go() -> tuple[list[Rollout], dict[str, float]]:
        weighed = {name: (spec, 1.0) for name, spec in specs.items()}
        async with Graders(weighed, timeout=timeout, **options) as graders:
            return await graders.grade(rollouts), flatten(graders.metrics())

    return asyncio.run(go())


# side by side


def test_async_calls_of_a_group_go_on_side_by_side() -> None:
    got, metrics = graded({"f": "async_graders:one_of_four"}, group("a", "b", "c", "d"))
    assert len({rollout.reward for rollout in got}) == 1  # one process
    assert {rollout.status for rollout in got} == {"ok"}
    assert "grading/restarts" not in metrics


def test_one_that_waits_too_long_is_given_up_and_its_process_lives_on() -> None:
    specs = {"f": "async_graders:by_text", "number": Number()}
    got, metrics = graded(specs, group("7", "forever", "raise", "8"), 0.5)
    assert [rollout.status for rollout in got] == ["ok", "error", "error", "ok"]
    assert got[1].error == "reward 'f' took longer than 0.5 s and was stopped"
    assert "reward 'f' raised ValueError: no such luck (async_graders.py:" in got[2].error
    assert metrics["grading/failed_timeout"] == metrics["grading/failed_raised"] == 1.0
    assert "grading/restarts" not in metrics
    assert got[0].rewards["f"] == got[3].rewards["f"]


@pytest.mark.parametrize(
    ("culprit", "reason", "message"),
    [
        pytest.param("block", "timeout", "took longer than 0.5 s and was stopped", marks=pytest.mark.long),
        ("stubborn", "timeout", "took longer than 0.5 s and was stopped"),
        ("die", "crashed", "ended its process with exit code 3"),
    ],
)
def test_the_one_that_takes_its_process_along_is_found(culprit: str, reason: str, message: str) -> None:
    got, metrics = graded({"f": "async_graders:by_text", "n": Number()}, group("7", culprit, "8"), 0.5)
    assert [rollout.status for rollout in got] == ["ok", "error", "ok"]
    assert got[1].error == f"reward 'f' {message}"
    assert [rollout.rewards["n"] for rollout in (got[0], got[2])] == [1.0, 0.0]
    assert metrics[f"grading/failed_{reason}"] == 1.0


# pools


def test_a_hung_grader_leaves_the_large_ones_process_alone(module: Any) -> None:
    async def go() -> list[list[Rollout]]:
        specs = {"large": (module.Large(), 1.0), "f": ("async_graders:blocks", 1.0)}
        async with Graders(specs, timeout=0.5) as graders:
            return [await graders.grade(group(*replies)) for replies in (["7", "block"], ["7", "8"])]

    first, second = asyncio.run(go())
    assert [rollout.status for rollout in first] == ["ok", "error"]
    assert first[0].rewards["large"] == second[0].rewards["large"]
    assert first[0].rewards["f"] != second[0].rewards["f"]  # that process was killed


def test_a_call_with_its_own_deadline_fails_as_a_whole_and_once(module: Any) -> None:
    """Each rollout alone would be as slow: asking again would multiply the wait."""
    got, metrics = graded({"large": module.Large(), "n": Number()}, group("7", "slow", "8"), 30.0)
    assert {rollout.status for rollout in got} == {"error"}
    assert {rollout.error for rollout in got} == {"reward 'large' took longer than 0.5 s and was stopped"}
    assert metrics["grading/restarts"] == 1.0


def test_a_hung_group_holds_up_no_other() -> None:
    """With two workers all other groups are graded while one hangs, in the worker that it does not hold."""

    async def go() -> tuple[bool, list[list[Rollout]]]:
        async with Graders({"f": ("async_graders:blocks", 1.0)}, workers=2, timeout=8.0) as graders:
            hung = asyncio.ensure_future(graders.grade(group("block", id="h@0")))
            await asyncio.sleep(0)
            fine = [await graders.grade(group("7", "8", id=f"t@{i}")) for i in range(5)]
            was_hanging = not hung.done()
            hung.cancel()
            await asyncio.wait([hung])
            return was_hanging, fine

    was_hanging, fine = asyncio.run(go())
    assert was_hanging
    assert all(rollout.status == "ok" for rollouts in fine for rollout in rollouts)


# who waits for whom


def test_waits_say_which_reward_of_which_group() -> None:
    async def go() -> list[waits.Wait]:
        async with Graders({"f": ("async_graders:blocks", 1.0)}, timeout=30.0) as graders:
            hung = asyncio.ensure_future(graders.grade(group("block")))
            behind = asyncio.ensure_future(graders.grade(group("7")))
            while not any("reward f" in wait.reason for wait in waits.current()):
                await asyncio.sleep(0.01)
            pending = waits.current()
            hung.cancel()
            behind.cancel()
            await asyncio.wait([hung, behind])
            return pending

    by_reason = {wait.reason: wait for wait in asyncio.run(go()) if wait.owner == "grading"}
    assert set(by_reason) == {"reward f of group t@0", "a free grading process"}
    assert by_reason["reward f of group t@0"].deadline == pytest.approx(30.0, abs=1.0)
    assert by_reason["reward f of group t@0"].on.startswith("grading process (pid ")
    assert by_reason["a free grading process"].on == "grading"
    assert not [wait for wait in waits.current() if wait.owner == "grading"]
