"""The made-up prompts of the comparison as an environment of Tandem's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from _versus import Work

from tandem.envs.base import Environment, Split
from tandem.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class Prompts(Environment):
    """The prompts of a comparison's work."""

    groups: int = 16
    """Prompts of a step."""
    prompt: int = 96
    """Tokens of each, the chat template included."""
    steps: int = 7
    """Steps that they are enough for."""

    def tasks(self, split: Split) -> Sequence[Task]:
        texts = Work(groups=self.groups, prompt=self.prompt, steps=self.steps).prompts()
        return [
            Task(id=str(i), env=self.name, prompt=(Message(role="user", content=text),), answer="")
            for i, text in enumerate(texts)
        ]

    def check(self, task: Task) -> None:
        return None
