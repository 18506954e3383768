"""MyEnv: what the model is asked, and what counts as right. Try it with ``tandem check my_env.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.envs.base import Environment, Split
from tandem.types import Message, Rollout, Task


@dataclass(frozen=True, kw_only=True)
class MyEnv(Environment):
    """Sums of two numbers; replace this by your own problems. Each field below is an option of the recipe."""

    largest: int = 9
    """Largest number in a question."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split, always in the same order. No task may be in both splits."""
        pairs = [(a, b) for a in range(1, self.largest + 1) for b in range(1, self.largest + 1)]
        held_out = [pair for pair in pairs if (pair[0] * 7 + pair[1]) % 5 == 0]
        chosen = held_out if split == "test" else [pair for pair in pairs if pair not in held_out]
        return [self._task(a, b) for a, b in chosen]

    def check(self, task: Task) -> str:
        """A reply that must earn full marks, so that a broken reward is found before training."""
        return f"The answer is {task.answer}"

    def _task(self, a: int, b: int) -> Task:
        question = f"What is {a} + {b}? End with: The answer is <number>"
        return Task(
            id=f"{a}+{b}",  # unique, and the same in every run
            env=self.name,
            prompt=(Message(role="user", content=question),),
            answer=str(a + b),
            meta={"terms": [a, b]},  # whatever else your reward needs
        )

    # For more than one turn, override play (https://tandem-rl.github.io/tandem/guide/multi-turn/).


def correct(rollout: Rollout) -> float:
    """1 if the reply ends with the right answer, else 0. It runs in a process of its own, which may be killed."""
    _, found, given = rollout.text.rpartition("The answer is")
    return float(bool(found) and given.strip().rstrip(".") == rollout.task.answer)
