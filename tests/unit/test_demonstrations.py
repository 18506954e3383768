"""Demonstrations: which tokens they are, in which order they come, and where the run's own answers begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.buffering import saved
from transformers import AutoTokenizer

from tandem.envs.data.chats import chats
from tandem.envs.data.rows import DataSource
from tandem.errors import EnvError
from tandem.metrics import Value
from tandem.rollout.demonstrations import Demonstrator, WarmStartSource
from tandem.rollout.source import Batch, DataState
from tandem.rollout.task_sampler import TaskOrder
from tandem.rollout.template import Template
from tandem.types import Message, Task

END = 257
FORGETS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('/')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that leaves out what was thought in earlier turns, as those of reasoning models do."""


def conversation(*texts: str, **fields: Any) -> tuple[Message, ...]:
    roles = ("user", "assistant")
    return tuple(Message(role=roles[n % 2], content=text, fields=fields) for n, text in enumerate(texts))


def demonstrate(template: Template, messages: tuple[Message, ...], context: int = 1000) -> Any:
    task = Task(id="t", env="data", prompt=messages[:1], answer="", meta={"messages": messages})
    return Demonstrator(template=template, context=context)(None, task, "t/0")


def test_demonstration_is_every_reply_up_to_its_end_and_one_sequence(template: Template) -> None:
    first, second = demonstrate(template, conversation("ab", "c", "d", "ef")).turns
    for turn, text in ((first, "c"), (second, "ef")):
        assert list(turn.completion.tokens) == [*template.more(text), END]
    assert second.prompt[: len(first.prompt) + 2] == (*first.prompt, *first.completion.tokens)
    assert list(second.prompt) == template.prompt(conversation("ab", "c", "d"))


def test_demonstration_of_a_template_that_forgets_is_several_sequences(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = FORGETS
    template = Template(tokenizer, {})
    first, second = demonstrate(template, conversation("a", "think/b", "c", "think/d")).turns
    assert template.decode(first.completion.tokens) == "think/b"
    assert "think" not in template.decode(second.prompt)
    assert template.decode(second.completion.tokens) == "think/d"


def test_demonstration_is_cut_at_the_context_and_skipped_beyond_it(template: Template) -> None:
    messages = conversation("ab", "cdefgh", "i", "j")
    whole = demonstrate(template, messages).turns[0]
    (cut,) = demonstrate(template, messages, context=len(whole.prompt) + 3).turns
    assert cut.completion.tokens == whole.completion.tokens[:3]
    assert cut.completion.finish == "length"
    assert demonstrate(template, messages, context=len(whole.prompt)) is None


def test_demonstration_leaves_out_replies_of_weight_zero(template: Template) -> None:
    messages = (*conversation("a", "b", weight=0), *conversation("c", "d"))
    assert [turn.trained for turn in demonstrate(template, messages).turns] == [False, True]
    assert demonstrate(template, messages[:2]) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "rows.jsonl:1: expected messages with an"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "rows.jsonl:1: expected messages with an",
        ),
        ('{"prompt": "a"}', "rows.jsonl:1: no column 'completion'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "rows.jsonl:1: column 'messages' should be a list"),
    ],
)
def test_rows_without_a_reply_are_refused_by_their_place(tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    with pytest.raises(EnvError, match=message):
        chats(DataSource(path=str(tmp_path / "rows.jsonl"), test_share=0.0), "train")


@dataclass
class Answers:
    """The run's own source: notes where it was opened."""

    opened: list[DataState] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, data_state: DataState) -> AsyncIterator[Answers]:
        self.opened.append(data_state)
        yield self

    async def take(self) -> Batch:
        return Batch((), self.data_state, lambda: None)

    def data_state(self) -> DataState:
        return self.opened[-1]

    async def saved(self, data_state: DataState) -> None: ...

    def metrics(self) -> Mapping[str, Value]:
        return {}


def warm_start(template: Template, answers: Answers) -> WarmStartSource:
    """Four steps of two; every third task has no reply."""
    tasks = [
        Task(
            id=f"{n}",
            env="data",
            prompt=(Message(role="user", content="a"),),
            answer="",
            meta={"messages": conversation("a", f"{n}") if n % 3 else ()},
        )
        for n in range(7)
    ]
    return WarmStartSource(
        steps=4,
        orders={"data": TaskOrder(name="data", label="", tasks=tasks, seed=1)},
        places=lambda batch: ["data"] * 2,
        demonstrated=Demonstrator(template=template, context=100),
        after=answers,
    )


@pytest.mark.parametrize("ended", range(6))
def test_warm_start_goes_on_where_it_was_ended_and_then_hands_over(template: Template, ended: int) -> None:
    async def batches(state: DataState, count: int, answers: Answers) -> tuple[list[list[str]], DataState]:
        async with warm_start(template, answers).open(state) as source:
            taken = [[group.id for group in (await source.take()).groups] for _ in range(count)]
            return taken, source.data_state()

    async def both() -> None:
        answers, again = Answers(), Answers()
        whole, last = await batches(DataState(), 6, answers)
        assert [len(batch) for batch in whole] == [2, 2, 2, 2, 0, 0]
        seen = [int(id.partition("@")[0]) for batch in whole for id in batch]
        assert len(seen) == 8
        assert all(n % 3 for n in seen)
        assert {id.partition("@")[0] for batch in whole[:2] for id in batch} == {"1", "2", "4", "5"}, "an epoch is all"
        before, state = await batches(DataState(), ended, again)
        after, end = await batches(saved(state), 6 - ended, again)
        assert before + after == whole
        assert end == last
        assert (last.taken, len(answers.opened)) == (4, 1)

    asyncio.run(both())


def test_warm_start_without_any_reply_says_what_to_give(template: Template) -> None:
    async def take() -> None:
        source = warm_start(template, Answers())
        source.demonstrated = lambda *_: None
        async with source.open(DataState()) as opened:
            await opened.take()

    with pytest.raises(EnvError, match=r"no reply to any of its 7 tasks .*warm_start\.data"):
        asyncio.run(take())
