"""Demonstrations: given replies as rollouts, for the steps of a warm start.

A demonstration is a rollout whose tokens nobody sampled: each has the advantage 1, and the step trains its
logprob (cross entropy). Batches of them come first, then those of the run's own source, which is opened only then: its
answers are sampled by the policy that the warm start has made.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tandem.errors import EnvError
from tandem.metrics import Sum, Value
from tandem.rollout.gold import gold_reply
from tandem.rollout.source import Batch, DataState, Draw, RolloutSource
from tandem.rollout.task_sampler import EnvRunner, TaskOrder
from tandem.rollout.template import Template
from tandem.types import UNKNOWN_LOGPROB, UNKNOWN_VERSION, Completion, Group, Message, Rollout, Task, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrator:
    """Makes rollouts of given replies."""

    template: Template
    context: int
    """Tokens of a conversation that are trained at most."""

    def __call__(self, order: TaskOrder | None, task: Task, id: str) -> Rollout | None:
        """A task's gold reply, or a row of data: the assistant's messages after the prompt, but those of weight 0.

        None where no reply is known, or where none fits the context.
        """
        messages: Sequence[Message] = task.meta.get("messages") or ()
        if isinstance(order, EnvRunner):
            gold = gold_reply(order.group_runner.env, order.group_runner.graders, task)
            if gold is None:
                return None
            messages = (*task.prompt, Message(role="assistant", content=gold[0]))
        try:
            replies = self.template.demonstrated(messages, task.meta.get("tools") or ())
        except EnvError as error:
            raise EnvError(f"{task.env}: task {task.id}: {error}") from error
        wanted = [
            place >= len(task.prompt) and each.fields.get("weight") != 0
            for place, each in enumerate(messages)
            if each.role == "assistant"
        ]
        turns = [
            self._turn(prompt, reply, is_trained)
            for (prompt, reply), is_trained in zip(replies, wanted, strict=True)
            if len(prompt) < self.context
        ]
        if not any(turn.trained for turn in turns):
            return None
        count = sum(len(turn.completion.tokens) for turn in turns)
        return Rollout(
            id=id,
            task=task,
            turns=tuple(turns),
            messages=tuple(messages),
            status="ok",
            reward=1.0,
            advantages=(1.0,) * count,
        )

    def _turn(self, prompt: Sequence[int], reply: Sequence[int], is_trained: bool) -> Turn:
        tokens = tuple(reply[: self.context - len(prompt)])
        completion = Completion(
            tokens=tokens,
            logprobs=(UNKNOWN_LOGPROB,) * len(tokens),
            versions=(UNKNOWN_VERSION,) * len(tokens),
            finish="stop" if len(tokens) == len(reply) else "length",
        )
        return Turn(prompt=tuple(prompt), completion=completion, temperature=1.0, trained=is_trained)


@dataclass(slots=True, kw_only=True)
class WarmStartSource:
    """A rollout source: batches of demonstrations, then those of another source."""

    steps: int
    """Batches of demonstrations."""
    orders: Mapping[str, TaskOrder]
    """Tasks with a reply, by the name of their environment."""
    places: Callable[[int], Sequence[str]]
    """The environment of each place of a batch."""
    demonstrated: Callable[[TaskOrder, Task, str], Rollout | None]
    """A task as a demonstration; None: it has none, and another takes its place."""
    after: RolloutSource
    """What comes then."""
    _taken: int = 0
    _drawn: Counter[str] = field(default_factory=Counter)
    _skipped: int = 0
    _opened: RolloutSource | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @asynccontextmanager
    async def open(self, data_state: DataState) -> AsyncIterator[RolloutSource]:
        """Go on where ``data_state`` stands."""
        self._taken, self._drawn = data_state.taken, Counter(data_state.drawn)
        async with self._stack:
            if self._taken >= self.steps:
                await self._go_on(data_state)
            elif any(data_state.tasks.get(name, order.mark) != order.mark for name, order in self.orders.items()):
                log.warning("the replies of the warm start are not those that the checkpoint was written with")
            yield self

    async def take(self) -> Batch:
        """The demonstrations of a step, or else what the other source has."""
        if self._taken == self.steps and self._opened is None:
            await self._go_on(self.data_state())
        if self._opened is not None:
            return await self._opened.take()
        names = self.places(self._taken)
        first = self._taken * len(names)
        groups = [self._group(self.orders[name], first + place) for place, name in enumerate(names)]
        self._taken += 1
        return Batch(groups, self.data_state, lambda: None, supervised=True)

    def data_state(self) -> DataState:
        """Where it stands; what comes after goes on with the tasks that were not drawn."""
        if self._opened is not None:
            return self._opened.data_state()
        marks = {name: order.mark for name, order in self.orders.items()}
        return DataState(taken=self._taken, drawn=dict(self._drawn), tasks=marks)

    async def saved(self, data_state: DataState) -> None:
        """A checkpoint is on disk."""
        if self._opened is not None:
            await self._opened.saved(data_state)

    def metrics(self) -> Mapping[str, Value]:
        """Metrics since the last call."""
        if self._opened is not None:
            return self._opened.metrics()
        skipped, self._skipped = self._skipped, 0
        return {"demonstrations/skipped": Sum(float(skipped))}

    async def _go_on(self, data_state: DataState) -> None:
        self._opened = await self._stack.enter_async_context(self.after.open(data_state))

    def _group(self, order: TaskOrder, index: int) -> Group:
        """The next task that has a demonstration."""
        for _ in range(len(order.tasks)):
            number = self._drawn[order.name]
            self._drawn[order.name] += 1
            task, id = order.of(Draw(order.name, number))
            rollout = self.demonstrated(order, task, f"{id}/0")
            if rollout is not None:
                return Group(id=id, index=index, env=order.name, rollouts=(rollout,))
            self._skipped += 1
        raise EnvError(
            f"{order.name} has no reply to any of its {len(order.tasks)} tasks that fits the context; give the warm "
            "start others: warm_start.data"
        )
