"""What an environment is: a supply of tasks, a way to play one, and a gold reply that must score full marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from tandem.types import Json, Message, Task

Split = Literal["train", "test"]
"""``test`` tasks are never trained on: an environment keeps the two disjoint by construction."""


class Chat(Protocol):
    """One conversation with the policy. Message space for the environment; token space is the worker's."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, the task's prompt first."""
        ...

    @property
    def open(self) -> bool:
        """False once the policy cannot speak again: its answer was cut or the context is full."""
        ...

    async def reply(self) -> Message:
        """Let the policy speak; its message is appended and returned."""
        ...

    def add(self, *messages: Message) -> None:
        """Append the environment's messages (tool results, a user's next line)."""
        ...

    def serve(self) -> AbstractAsyncContextManager[str]:
        """Let a program talk to the policy: base URL of an OpenAI-compatible API while the block lasts.

        What is said there takes the place of this conversation.
        """
        ...


class Environment(ABC):
    """A frozen dataclass whose fields are its options. Never imports torch; construction reads no data."""

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

    @abstractmethod
    def check(self, task: Task) -> str | None:
        """A reply that must earn full marks, so that a broken grader is found before training.

        None if no such reply is known: a puzzle that is easy to verify but comes without a solution.
        """
