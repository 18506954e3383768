"""The space of sums such as ``3 + 4 * 2``: numbered, drawn from and split without listing it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem.envs.base import Split
from tandem.envs.data.split import split_of
from tandem.errors import ConfigError
from tandem.expression import as_text, evaluate

_SYMBOLS = "+-*"
_LARGEST_SPACE = 10**18
_MOST_TERMS = 60
"""Of two numbers or operators each, so many terms are beyond the largest space already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Every expression of ``terms`` numbers from ``low`` to ``high`` joined by the operators."""

    operators: tuple[str, ...]
    """Any of + - *."""
    terms: int
    """Numbers in one expression."""
    low: int
    """Smallest number."""
    high: int
    """Largest number."""

    def __post_init__(self) -> None:
        unknown = [symbol for symbol in self.operators if symbol not in tuple(_SYMBOLS)]
        if unknown or not self.operators or len(set(self.operators)) < len(self.operators):
            raise ConfigError(f"operators must be some of + - *, each once, got {list(self.operators)}")
        if not 2 <= self.terms <= _MOST_TERMS:
            raise ConfigError(f"terms must be from 2 to {_MOST_TERMS}, got {self.terms}")
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"min_number must be from 0 to max_number ({self.high}), got {self.low}")
        if self.count > _LARGEST_SPACE:
            raise ConfigError(f"terms: {self.terms} of them make more than 10^18 questions; use fewer or smaller ones")

    @property
    def count(self) -> int:
        """How many expressions there are."""
        return int((self.high - self.low + 1) ** self.terms * len(self.operators) ** (self.terms - 1))

    def draw(self, size: int, seed: int, split: Split, test_share: float) -> list[int]:
        """Numbers of the split's expressions among ``size`` drawn without repetition, in random order."""
        drawn = random.Random(seed).sample(range(self.count), min(size, self.count))
        return [number for number in drawn if split_of(self.expression(number), test_share) == split]

    def expression(self, number: int) -> str:
        """The expression with this number."""
        width = self.high - self.low + 1
        number, first = divmod(number, width)
        parts = [str(self.low + first)]
        for _ in range(self.terms - 1):
            number, symbol = divmod(number, len(self.operators))
            number, term = divmod(number, width)
            parts += [self.operators[symbol], str(self.low + term)]
        return " ".join(parts)


def worth(expression: str) -> str:
    """The expression's value as text."""
    return as_text(evaluate(expression).value)
