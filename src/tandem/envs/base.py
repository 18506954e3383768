"""Base of environments: tasks, a way to play one, and a gold reply that must score full marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from tandem.errors import Bounded
from tandem.types import Json, Message, Rollout, Task, Turn

Split = Literal["train", "test"]
"""``test`` tasks are never trained on: an environment keeps the two disjoint by construction."""


class Chat(Protocol):
    """One conversation with the policy, in messages; its tokens are recorded beside them.

    Example:
        >>> import tandem
        >>> async def twice(chat: tandem.Chat) -> str:
        ...     first = await chat.reply()
        ...     if chat.open:
        ...         chat.add(tandem.Message(role="user", content="Are you sure?"))
        ...         return (await chat.reply()).content
        ...     return first.content
    """

    @property
    def id(self) -> str:
        """Id of the rollout that is played."""
        ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, the task's prompt first."""
        ...

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What the policy said so far, token by token."""
        ...

    @property
    def open(self) -> bool:
        """False once the policy cannot speak again: its answer was cut or the context is full."""
        ...

    async def reply(self) -> Message:
        """Let the policy speak; its message is appended and returned."""
        ...

    def mark(self, turn: int = -1, *, reward: float | None = None, trained: bool = True) -> None:
        """Give a turn of the policy's (-1: the last) a reward of its own, or leave it out of the loss."""
        ...

    def add(self, *messages: Message) -> None:
        """Append the environment's messages (tool results, a user's next line)."""
        ...

    def serve(self) -> AbstractAsyncContextManager[str]:
        """Let a program talk to the policy: base URL of an OpenAI-compatible API while the block lasts.

        What is said there takes the place of this conversation.
        """
        ...


class Environment(Bounded, ABC):
    """Tasks, how one is played, and a gold reply. A frozen dataclass whose fields are its options.

    It never imports torch, and construction reads no data.

    Example:
        >>> import tandem
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Doubles(tandem.Environment):
        ...     largest: int = 20
        ...
        ...     @property
        ...     def default_rewards(self):
        ...         return {"number": 1.0}
        ...
        ...     def tasks(self, split):
        ...         numbers = [n for n in range(self.largest) if (n % 5 == 0) == (split == "test")]
        ...         ask = "What is {n} times 2?"
        ...         prompts = {n: (tandem.Message(role="user", content=ask.format(n=n)),) for n in numbers}
        ...         return [
        ...             tandem.Task(id=str(n), env=self.name, prompt=prompts[n], answer=str(2 * n)) for n in numbers
        ...         ]
        ...
        ...     def check(self, task):
        ...         return task.answer
        >>> env = Doubles(largest=10)
        >>> [task.answer for task in env.tasks("test")]
        ['0', '10']
    """

    @property
    def name(self) -> str:
        """How it is called in metrics and task ids: the file's name unless a part says otherwise."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def default_rewards(self) -> Mapping[str, Json]:
        """Rewards used where the recipe names none, as a recipe would write them: name -> weight or options."""
        return {}

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split, in an order that never changes. Procedural ones are generated on access.

        Raises:
            EnvError: the data cannot be read; names the file and line.
        """

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        """Converse until done and return metrics; rewards are scored afterwards. One turn unless overridden."""
        await chat.reply()
        return {}

    async def finish(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """The siblings of one task, all played and not yet graded: an environment that scores them together adds it."""
        return rollouts

    @abstractmethod
    def check(self, task: Task) -> str | None:
        """A reply that must earn full marks, so that a broken grader is found before training.

        The task's bare answer is no reply: rewards put it in the form they ask for (``Reward.phrase``), and form alone
        is not judged. None if no such reply is known: a puzzle that is easy to verify but comes without a solution.
        """
