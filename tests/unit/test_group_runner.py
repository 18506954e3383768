"""The group runner: siblings of their own streams, scored together; a failure stays with its rollout."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.uniform_engine import Fake

from tandem.engines.base import Engine
from tandem.envs.base import Chat, Environment, Split
from tandem.errors import EngineError, EnvError
from tandem.rollout.group_runner import GroupRunner
from tandem.rollout.template import Template
from tandem.types import Group, Message, Rollout, Sampling, Task


@dataclass(frozen=True, kw_only=True)
class Talk(Environment):
    """Two turns; what goes wrong is in the task."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return []

    def check(self, task: Task) -> str:
        return ""

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        await chat.reply()
        if task.meta.get("raise") is not None:
            raise copy.copy(task.meta["raise"])
        if task.meta.get("two") and chat.open:
            chat.add(Message(role="user", content="go on"))
            await chat.reply()
        return {"turns": float(len([m for m in chat.messages if m.role == "assistant"]))}


@dataclass
class Marks:
    """Graders that give each answer's length, and keep what they were shown."""

    seen: list[list[Rollout]]
    singly: bool = False

    async def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        self.seen.append(list(rollouts))
        return [
            r if r.status == "error" else replace(r, rewards={"n": float(r.num_tokens)}, reward=float(r.num_tokens))
            for r in rollouts
        ]

    async def grade_one(self, rollout: Rollout) -> Rollout:
        (graded,) = await self.grade([rollout])
        return graded


def play(
    template: Template,
    *,
    id: str = "t@0",
    seed: int = 0,
    size: int = 3,
    context: int = 1024,
    max_tokens: int = 6,
    engine: Engine | None = None,
    truncated: Any = "keep",
    **meta: Any,
) -> tuple[Group, Marks]:
    task = Task(id="t", env="talk", prompt=(Message(role="user", content="?"),), answer="", meta=meta)
    marks = Marks([])

    async def go() -> Group:
        async with Fake(vocab=258).open(None, context=context) as fake:  # the last id is the tokenizer's end token
            runner = GroupRunner(
                name="talks",
                env=Talk(),
                engine=engine or fake,
                graders=marks,  # type: ignore[arg-type]
                template=template,
                seed=seed,
                truncated=truncated,
                truncated_penalty=0.25,
            )
            sampling = Sampling(max_tokens=max_tokens)
            return await runner.run(task, id=id, index=4, size=size, sampling=sampling)

    return asyncio.run(go()), marks


def tokens(group: Group) -> list[tuple[int, ...]]:
    return [turn.completion.tokens for r in group.rollouts for turn in r.turns]


def test_an_answer_that_was_cut_is_left_out_of_the_loss_or_pays(template: Template) -> None:
    kept, masked, penalised = (
        play(template, size=64, max_tokens=120, truncated=how)[0] for how in ("keep", "mask", "penalise")
    )
    cut = [rollout.truncated for rollout in kept.rollouts]
    assert len(set(cut)) == 2
    assert all(rollout.trained for rollout in (*kept.rollouts, *penalised.rollouts))
    assert [not rollout.trained for rollout in masked.rollouts] == cut
    rewards = [rollout.reward or 0.0 for rollout in kept.rollouts]
    assert [rollout.reward for rollout in masked.rollouts] == rewards
    assert [r.reward for r in penalised.rollouts] == [x - 0.25 * is_cut for x, is_cut in zip(rewards, cut, strict=True)]


def test_a_failed_answer_that_was_cut_has_nothing_to_pay_with(template: Template) -> None:
    group, _ = play(template, size=8, max_tokens=1, truncated="penalise", **{"raise": ValueError("late")})
    assert [rollout.reward for rollout in group.rollouts] == [None] * 8


def test_a_group_is_scored_as_soon_as_its_own_answers_are_there(template: Template) -> None:
    """While others of the same batch are still being sampled, on-policy too."""
    marks, late = Marks([]), asyncio.Event()

    @dataclass(frozen=True, kw_only=True)
    class Late(Talk):
        async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
            if task.id == "late":
                await late.wait()
            return await super().play(task, chat)

    async def go() -> None:
        async with Fake(vocab=258).open(None, context=64) as engine:
            runner = GroupRunner(
                name="talks",
                env=Late(),
                engine=engine,
                graders=marks,  # type: ignore[arg-type]
                template=template,
                seed=0,
            )

            def begin(id: str) -> asyncio.Task[Group]:
                task = Task(id=id, env="talk", prompt=(Message(role="user", content="?"),), answer="")
                return asyncio.ensure_future(runner.run(task, id=id, index=0, size=2, sampling=Sampling(max_tokens=4)))

            last, first = begin("late"), begin("early")
            scored = await first
            assert [r.reward for r in scored.rollouts] == [float(r.num_tokens) for r in scored.rollouts]
            assert [r.task.id for r in marks.seen[0]] == ["early", "early"]
            assert not last.done()
            late.set()
            await last
        assert len(marks.seen) == 2

    asyncio.run(asyncio.wait_for(go(), 20))


@pytest.mark.parametrize("singly", [True, False])
def test_an_answer_is_scored_while_its_siblings_are_sampled_where_no_reward_needs_them(
    template: Template, singly: bool
) -> None:
    marks, late = Marks([], singly), asyncio.Event()
    answers = iter(range(3))

    @dataclass(frozen=True, kw_only=True)
    class Late(Talk):
        async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
            if next(answers) == 1:
                await late.wait()
            return await super().play(task, chat)

    async def go() -> Group:
        async with Fake(vocab=258).open(None, context=64) as engine:
            graders: Any = marks
            runner = GroupRunner(name="t", env=Late(), engine=engine, graders=graders, template=template, seed=0)
            task = Task(id="t", env="talk", prompt=(Message(role="user", content="?"),), answer="")
            run = asyncio.ensure_future(runner.run(task, id="t", index=0, size=3, sampling=Sampling(max_tokens=4)))
            for _ in range(200):
                await asyncio.sleep(0)
            assert sorted(r.id for rollouts in marks.seen for r in rollouts) == (["t/0", "t/2"] if singly else [])
            late.set()
            return await run

    group = asyncio.run(asyncio.wait_for(go(), 20))
    assert [r.id for r in group.rollouts] == ["t/0", "t/1", "t/2"]
    assert [r.reward for r in group.rollouts] == [float(r.num_tokens) for r in group.rollouts]
    assert [len(rollouts) for rollouts in marks.seen] == ([1, 1, 1] if singly else [3])


def test_group_holds_scored_siblings_in_order(template: Template) -> None:
    group, marks = play(template, two=True, max_tokens=500)
    assert (group.id, group.index, group.env) == ("t@0", 4, "talks")
    assert [r.id for r in group.rollouts] == ["t@0/0", "t@0/1", "t@0/2"]
    assert len(marks.seen) == 1, "siblings are graded together"
    assert marks.seen[0] == [replace(r, rewards={}, reward=None) for r in group.rollouts]
    for r in group.rollouts:
        assert r.status == "ok"
        assert r.reward == r.num_tokens == sum(len(turn.completion.tokens) for turn in r.turns)
        answers = [m for m in r.messages if m.role == "assistant"]
        assert r.metrics == {"turns": len(answers)}
        assert len(r.turns) == len(answers)
        assert r.text == "\n".join(m.content for m in answers)


def test_the_prompt_is_rendered_once_for_all_siblings(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    prompt = Template.prompt

    def counted(self: Template, *args: Any) -> list[int]:
        rendered.append(len(args))
        return prompt(self, *args)

    monkeypatch.setattr(Template, "prompt", counted)
    group, _ = play(template, size=5)
    assert len(rendered) == 1
    assert len({id(r.turns[0].prompt) for r in group.rollouts}) == 1, "graders and checkpoints are sent it once"


def test_streams_belong_to_seed_group_and_sibling(template: Template) -> None:
    one, again = play(template)[0], play(template)[0]
    assert tokens(one) == tokens(again)
    assert len(set(tokens(one))) == 3, "siblings differ"
    assert not set(tokens(one)) & set(tokens(play(template, seed=1)[0])), "another seed"
    assert not set(tokens(one)) & set(tokens(play(template, id="t@1")[0])), "the next visit of the task"
    assert tokens(play(template, size=5)[0])[:3] == tokens(one), "more siblings do not change the first"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            ValueError("three is not seven"),
            "environment: ValueError: three is not seven (test_group_runner.py:36 in play",
        ),
        (EnvError("the tool is down; start it"), "environment: the tool is down; start it"),
    ],
)
def test_failure_of_the_environment_is_the_rollouts(
    template: Template, caplog: pytest.LogCaptureFixture, error: Exception, says: str
) -> None:
    with caplog.at_level(logging.INFO):
        group, marks = play(template, **{"raise": error})
    for r in group.rollouts:
        assert r.status == "error"
        assert r.error.startswith(says)
        assert r.reward is None
        assert len(r.turns) == 1, "what was sampled before is kept, for people"
        assert r.messages[-1].role == "assistant"
    assert group.scored == ()
    assert len(marks.seen) == 1
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1, "the first of its kind"
    assert all(f"t@0/{number}" in caplog.text for number in range(3))


def test_prompt_without_room_costs_its_rollouts(template: Template) -> None:
    group, _ = play(template, context=4)
    assert {r.status for r in group.rollouts} == {"error"}
    assert all("the context is 4" in r.error for r in group.rollouts)
    assert all(r.turns == () for r in group.rollouts)


def test_failure_of_the_engine_is_everybodys(template: Template) -> None:
    class Gone:
        context = 100

        async def generate(self, *arguments: Any) -> None:
            raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        play(template, engine=Gone())  # type: ignore[arg-type]


def test_answer_cut_by_the_limit_is_truncated(template: Template) -> None:
    group, _ = play(template, max_tokens=1, two=True)
    assert all(r.truncated and len(r.turns) == 1 for r in group.rollouts)
