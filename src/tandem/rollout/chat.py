"""Chat: one conversation of an environment with the policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from tandem.engines.base import Sampler
from tandem.errors import EnvError
from tandem.rollout.template import Template
from tandem.rollout.turns import sample_turn
from tandem.types import Message, Sampling, Task, Turn


class EngineChat:
    """A conversation on an engine: the environment sees messages, the record holds token ids. An ``envs.base.Chat``."""

    def __init__(
        self,
        engine: Sampler,
        template: Template,
        task: Task,
        sampling: Sampling,
        stream: str,
        prompt: Sequence[int] | None = None,
        id: str = "",
    ):
        """No request is made yet.

        Args:
            engine: samples.
            template: turns messages into tokens.
            task: begins the conversation.
            sampling: how answers are sampled.
            stream: names this conversation's random stream: the same name draws the same tokens.
            prompt: the task's messages as tokens, where they are known.
            id: of the rollout.
        """
        self.id = id or stream
        self._engine = engine
        self._task = task.id
        self._template = template
        self._sampling = sampling
        self._stream = stream
        self._messages: list[Message] = list(task.prompt)
        self._turns: list[Turn] = []
        self._pending: list[Message] = []
        self._replying = False
        self._tokens = tuple(template.prompt(task.prompt) if prompt is None else prompt)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, the task's prompt first."""
        return tuple(self._messages)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The token-exact record."""
        return tuple(self._turns)

    @property
    def open(self) -> bool:
        """False once the last answer was cut, or the context has no room for another."""
        cut = bool(self._turns) and self._turns[-1].completion.finish == "length"
        return not cut and len(self._tokens) < self._engine.context

    def mark(self, turn: int = -1, *, reward: float | None = None, trained: bool = True) -> None:
        """Give a turn a reward of its own, or leave it out of the loss."""
        self._turns[turn] = replace(self._turns[turn], reward=reward, trained=trained)

    def add(self, *messages: Message) -> None:
        """Append the environment's messages; raises TypeError for anything else."""
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"chat.add got a {type(message).__name__}; expected a tandem.Message")
        self._messages.extend(messages)
        self._pending.extend(messages)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """An OpenAI-compatible API while the block lasts; what is said there takes this conversation's place."""
        from tandem.agents.server import Proxy, Session  # only agents need them

        session = Session(self._engine, self._template, self._sampling, self._stream)
        proxy = Proxy(session, model="policy")
        try:
            with session.played():
                async with proxy.serving() as url:
                    yield f"{url}/{proxy.key}/v1"
        finally:
            self._turns = list(session.turns)
            self._messages = list(session.messages or self._messages)
            if self._turns:  # an environment may go on with what was answered last
                self._tokens = self._turns[-1].prompt
                self._pending.clear()

    async def reply(self) -> Message:
        """Let the policy speak.

        Raises:
            EngineError: the engine failed.
            EnvError: the conversation fills the context, or the environment asked twice at once or without saying
                anything in between. Each is a matter of this one conversation.
        """
        if self._replying:
            raise EnvError("the environment asks for two replies at once; await chat.reply() before the next")
        if self._turns:
            self._close_turn()
        elif self._pending:
            self._tokens = tuple(self._template.prompt(self._messages))
            self._pending.clear()
        if len(self._tokens) >= self._engine.context:
            full = f"{len(self._tokens)} tokens and the context is {self._engine.context}"
            raise EnvError(f"the conversation of task {self._task} has {full}; shorten it, or raise context")
        stream = f"{self._stream}/{len(self._turns)}"
        self._replying = True
        try:
            turn = await sample_turn(self._engine, self._tokens, self._sampling, stream)
        finally:
            self._replying = False
        self._turns.append(turn)
        message = Message(role="assistant", content=self._template.decode(turn.completion.tokens))
        self._messages.append(message)
        return message

    def _close_turn(self) -> None:
        """Join the last completion and the environment's reply to the prompt of the next turn."""
        if not self._pending:
            raise EnvError("the policy was to speak twice without a message in between; call chat.add first")
        sampled = self._turns[-1].completion.tokens
        opening = self._messages[: len(self._messages) - len(self._pending) - 1]
        bridge = self._template.bridge(opening, self._pending, last=sampled[-1])
        self._tokens = (*self._tokens, *sampled, *bridge)
        self._pending.clear()
