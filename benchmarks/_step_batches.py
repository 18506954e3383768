"""Made-up groups in the place of sampled ones: a run of Tandem's own loop whose batches have the lengths asked for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.rollout.source import Batch, DataState
from tandem.types import Completion, Group, Message, Rollout, Task, Turn


@dataclass(frozen=True)
class Shape:
    """One kind of batch."""

    name: str
    """How its figures are called."""
    groups: int
    """Prompts."""
    siblings: int
    """Answers of each; all share its tokens."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""

    @property
    def length(self) -> int:
        """Of a sequence."""
        return self.prompt + self.answer


def of_length(length: int, tokens: int) -> Shape:
    """Sequences of one length, a quarter of it prompt, none sharing anything: ``tokens`` in all."""
    return Shape(f"length {length}", max(1, tokens // length), 1, length // 4, length - length // 4)


def groups(shape: Shape, vocabulary: int, seed: int) -> list[Group]:
    """Random tokens, rewarded at random."""
    draw = random.Random(seed)
    made = []
    for index in range(shape.groups):
        prompt = tuple(draw.choices(range(vocabulary), k=shape.prompt))
        task = Task(id=f"{seed}-{index}", env=shape.name, prompt=(Message(role="user", content=""),), answer="")
        rollouts = [_rollout(task, prompt, draw, shape, vocabulary, i) for i in range(shape.siblings)]
        made.append(Group(id=f"{task.id}@0", index=index, env=shape.name, rollouts=tuple(rollouts)))
    return made


def _rollout(
    task: Task, prompt: tuple[int, ...], draw: random.Random, shape: Shape, vocabulary: int, sibling: int
) -> Rollout:
    tokens = tuple(draw.choices(range(vocabulary), k=shape.answer))
    size = len(tokens)
    completion = Completion(tokens=tokens, logprobs=(-12.0,) * size, versions=(0,) * size, finish="length")
    return Rollout(
        id=f"{task.id}@0/{sibling}",
        task=task,
        turns=(Turn(prompt=prompt, completion=completion, temperature=1.0),),
        messages=task.prompt,
        status="ok",
        reward=draw.random(),
        advantages=(draw.uniform(-1, 1),) * size,
    )


class MadeUp:
    """A source of them: each shape so many times, then the next."""

    def __init__(self, shapes: Sequence[Shape], times: int, vocabulary: int):
        self._batches: Iterator[list[Group]] = (
            groups(shape, vocabulary, 1000 * i + j) for i, shape in enumerate(shapes) for j in range(times)
        )

    @contextlib.asynccontextmanager
    async def open(self, data_state: DataState) -> AsyncIterator[MadeUp]:
        yield self

    async def take(self) -> Batch:
        return Batch(next(self._batches), position=self.data_state, free=lambda: None)

    def data_state(self) -> DataState:
        return DataState()

    async def saved(self, data_state: DataState) -> None:
        """Nothing is kept for a checkpoint."""

    def metrics(self) -> Mapping[str, Any]:
        return {}
