"""Base of environments of sums such as ``3 + 4 * 2``: the space of them is numbered, and drawn from without listing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tandem.envs.base import Environment, Split
from tandem.envs.data.split import split_of
from tandem.errors import ConfigError, bounded
from tandem.expression import as_text, evaluate
from tandem.types import Json, Message, Task

_LARGEST_SPACE = 10**18


@dataclass(frozen=True, kw_only=True)
class SumTasks(Environment):
    """Expressions of ``terms`` numbers joined by the operators."""

    default_rewards: ClassVar[Mapping[str, Json]] = {"number": 1.0}

    operators: tuple[str, ...] = ("+",)
    """Any of + - *."""
    terms: int = bounded(2, least=2, most=60)
    """Numbers in one question."""
    min_number: int = 1
    """Smallest number."""
    max_number: int = 9
    """Largest number."""
    prompt: str = "What is {expression}?"
    """The question; {expression} stands for the sum."""
    size: int = bounded(10_000, least=1)
    """Most questions, both splits together; fewer if the numbers allow no more."""
    test_share: float = bounded(0.2, below=1)
    """Share of questions held out."""
    seed: int = 0
    """Which questions are drawn, and their order."""

    def __post_init__(self) -> None:
        if "{expression}" not in self.prompt:
            raise ConfigError(f"prompt must contain {{expression}}, got {self.prompt!r}")
        super().__post_init__()
        if not self.operators or not set(self.operators) <= set("+-*"):
            raise ConfigError(f"operators must be some of + - *, got {list(self.operators)}")
        if not 0 <= self.min_number <= self.max_number:
            raise ConfigError(f"min_number must be from 0 to max_number ({self.max_number}), got {self.min_number}")
        if self.count > _LARGEST_SPACE:
            raise ConfigError(f"terms: {self.terms} of them make more than 10^18 questions; use fewer or smaller ones")

    @property
    def count(self) -> int:
        """How many expressions there are."""
        return int((self.max_number - self.min_number + 1) ** self.terms * len(self.operators) ** (self.terms - 1))

    def draw(self, split: Split) -> list[int]:
        """Numbers of the split's expressions among ``size`` drawn without repetition, in random order."""
        drawn = random.Random(self.seed).sample(range(self.count), min(self.size, self.count))
        return [number for number in drawn if split_of(self.expression(number), self.test_share) == split]

    def expression(self, number: int) -> str:
        """The expression with this number."""
        width = self.max_number - self.min_number + 1
        number, first = divmod(number, width)
        parts = [str(self.min_number + first)]
        for _ in range(self.terms - 1):
            number, symbol = divmod(number, len(self.operators))
            number, term = divmod(number, width)
            parts += [self.operators[symbol], str(self.min_number + term)]
        return " ".join(parts)

    def question(self, expression: str) -> str:
        """The prompt with an expression filled in."""
        return self.prompt.replace("{expression}", expression)

    def task(self, expression: str, prompt: tuple[Message, ...]) -> Task:
        """The task of an expression."""
        return Task(
            id=expression.replace(" ", ""),
            env=self.name,
            prompt=prompt,
            answer=worth(expression),
            meta={"expression": expression},
        )


def worth(expression: str) -> str:
    """The expression's value as text."""
    return as_text(evaluate(expression).value)
