"""The environment of examples/guess.yaml: it thinks of a number, and the policy guesses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.envs.base import Chat, Environment, Split
from tandem.types import Json, Message, Rollout, Task


@dataclass(frozen=True, kw_only=True)
class Guess(Environment):
    """Guess a number; each wrong guess is answered by "higher" or "lower"."""

    largest: int = 50
    """Largest number."""
    guesses: int = 4
    """Most guesses."""

    @property
    def default_rewards(self) -> Mapping[str, Json]:
        """Used where the recipe names no rewards."""
        return {"guess:near": 1.0}

    def tasks(self, split: Split) -> Sequence[Task]:
        """Every fifth number is held out."""
        ask = f"Guess my number, from 1 to {self.largest}. Reply with a number only."
        prompt = (Message(role="user", content=ask),)
        numbers = [n for n in range(1, self.largest + 1) if (n % 5 == 0) == (split == "test")]
        return [Task(id=str(n), env=self.name, prompt=prompt, answer=str(n)) for n in numbers]

    def check(self, task: Task) -> str:
        """A reply that must get full marks."""
        return task.answer

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        """Let the policy guess until it is right or out of guesses; what is returned becomes a metric."""
        for turn in range(1, self.guesses + 1):
            guess = (await chat.reply()).content.strip()
            if guess == task.answer or turn == self.guesses or not chat.open:
                break
            low = guess.isdigit() and int(guess) < int(task.answer)
            chat.add(Message(role="user", content="Higher." if low else "Lower."))
        return {"guesses": turn}


def near(rollout: Rollout) -> float:
    """1 for the number, less the further off the last guess was: siblings that are all wrong still differ."""
    guesses = re.findall(r"\d+", rollout.messages[-1].content)
    off = abs(int(guesses[-1][:9]) - int(rollout.task.answer)) if guesses else 50
    return max(0.0, 1 - off / 50)
