"""Base of environments that are reset and then stepped with what the policy says, in the interpreter that has them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import ClassVar

from tandem.envs._package import Package
from tandem.envs.base import Chat, Environment, Split
from tandem.envs.data.split import Tasks, some, split_of
from tandem.errors import ConfigError, bounded
from tandem.observability import waits
from tandem.types import Json, Message, Task

_SYSTEM = "You play a game. Reply with your next move and nothing else."


@dataclass(frozen=True, kw_only=True)
class Game(Environment):
    """Episodes by their seeds; what the environment says is a user's message, and the policy's reply its action.

    The sum of the rewards is the reward ``environment``; each is also the reward of its turn (``turn_returns``).
    """

    default_rewards: ClassVar[Mapping[str, Json]] = {"environment": 1.0}

    python: str = ""
    """Interpreter that has the package and the environment; empty: this one."""
    system: str = _SYSTEM
    """System message, which says how to reply."""
    size: int = bounded(1000, least=2)
    """Seeds of both splits together; each begins the same episode again, where the environment heeds it."""
    test_share: float = bounded(0.2, below=1)
    """Share of seeds held out."""
    max_turns: int = bounded(20, least=1)
    """Most times the policy speaks."""
    timeout_seconds: float = bounded(60.0, above=0)
    """How long one reset or step may take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.system:
            raise ConfigError("system must say how to reply, got an empty text")

    def tasks(self, split: Split) -> Sequence[Task]:
        """Seeds; an episode is begun now, to see that it can be.

        Raises:
            EnvError: the environment cannot be loaded or reset, or the split has no seed.
        """
        self._package.read("reset", key="", seed=0)
        self._package.read("close", key="")
        seeds = [seed for seed in range(self.size) if split_of(str(seed), self.test_share) == split]
        prompt = (Message(role="system", content=self.system),)
        make = partial(Task, env=self.name, prompt=prompt, answer="")
        seeds = list(some(seeds, self.name, split, "change size or test_share"))
        return Tasks(seeds, lambda seed: make(id=f"seed/{seed}", meta={"seed": seed}))

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        owner = f"rollout {chat.id}"
        ask = partial(self._package.answer, self.timeout_seconds, owner, key=chat.id)
        await waits.wait(self._slots.acquire(), owner=owner, reason="a session", on=f"environment {self.name}")
        try:
            seen, reward, turns = await ask("reset", seed=task.meta["seed"]), 0.0, 0
            while not seen["done"] and turns < self.max_turns and chat.open:
                chat.add(Message(role="user", content=seen["text"]))
                reply = await chat.reply()
                seen, turns = await ask("step", move=reply.content), turns + 1
                chat.mark(reward=seen["reward"])
                reward += seen["reward"]
        finally:
            self._package.tell("close", key=chat.id)
            self._slots.release()
        return {"reward": reward, "turns": float(turns), "done": float(seen["done"])}

    def check(self, task: Task) -> None:
        """None: only the environment knows what it takes for right."""

    @cached_property
    def _package(self) -> Package:
        """What makes an episode there are the options that are not of every game."""
        every = {field.name for field in fields(Game)}
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in every}
        return Package(self.python, "games", self.name, package=self.name, **options)

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        """Most episodes at once, where the environment has a bound."""
        return asyncio.Semaphore(getattr(self, "concurrency", 1 << 20))
