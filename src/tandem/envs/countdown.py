"""Countdown: reach a target from given numbers. Every puzzle has a solution, and many do."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.envs.base import Environment, Split
from tandem.envs.data.split import Tasks, opening, some, split_of
from tandem.errors import ConfigError, bounded
from tandem.types import Json, Task

_INSTRUCTION = "Put the expression between <answer> and </answer>, for example <answer>(1 + 2) * 3</answer>."
_GIVE_UP_AFTER = 2000
"""Attempts without a new puzzle after which the options allow no more."""

_Puzzle = tuple[tuple[int, ...], int, str]
"""Numbers, target, an expression that solves it."""


@dataclass(frozen=True, kw_only=True)
class Countdown(Environment):
    """Write an expression over given numbers that equals a target; no data needed."""

    min_numbers: int = 3
    """Fewest numbers in a puzzle."""
    max_numbers: int = 4
    """Most numbers in a puzzle."""
    max_number: int = bounded(99, least=1)
    """Largest given number; the smallest is 1."""
    max_target: int = bounded(999, least=1)
    """Largest target; the smallest is 1."""
    operators: tuple[str, ...] = ("+", "-", "*", "/")
    """Any of + - * /."""
    use_all: bool = True
    """True: each number exactly once. False: each at most once."""
    instruction: str = _INSTRUCTION
    """Added beneath every question."""
    system: str = ""
    """System message; empty: none."""
    size: int = bounded(2000, least=1)
    """Most puzzles, both splits together; fewer if the options allow no more."""
    test_share: float = bounded(0.1, below=1)
    """Share of puzzles held out."""
    seed: int = 0
    """Which puzzles are made."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_numbers <= self.max_numbers:
            raise ConfigError(f"min_numbers must be from 2 to max_numbers ({self.max_numbers}), got {self.min_numbers}")
        if not self.operators or not set(self.operators) <= set("+-*/"):
            raise ConfigError(f"operators must be some of + - * /, got {list(self.operators)}")
        super().__post_init__()

    @property
    def default_rewards(self) -> Mapping[str, Json]:
        return {"countdown": {"weight": 1.0, "use": "all" if self.use_all else "some"}}

    def tasks(self, split: Split) -> Sequence[Task]:
        rows = [(key, puzzle) for key, puzzle in self._puzzles.items() if split_of(key, self.test_share) == split]
        remedy = f"{len(self._puzzles)} puzzles were found in all: widen the numbers, or change size or test_share"
        return Tasks(some(rows, self.name, split, remedy), lambda row: self._task(*row))

    def check(self, task: Task) -> str:
        return f"<answer>{task.answer}</answer>"

    @cached_property
    def _puzzles(self) -> dict[str, _Puzzle]:
        """Puzzles by a key that ignores the order of the numbers."""
        rng = random.Random(self.seed)
        puzzles: dict[str, _Puzzle] = {}
        vain = 0
        while len(puzzles) < self.size and vain < _GIVE_UP_AFTER:
            vain += 1
            length = self.min_numbers + rng.randrange(self.max_numbers - self.min_numbers + 1)
            numbers = [1 + rng.randrange(self.max_number) for _ in range(length)]
            target, solution = _combine(numbers, self.operators, rng)
            if not 1 <= target <= self.max_target:
                continue
            key = f"{'+'.join(map(str, sorted(numbers)))}={target}"
            if key not in puzzles:
                vain = 0
                puzzles[key] = (tuple(numbers), target, solution[1:-1])
        return puzzles

    def _task(self, key: str, puzzle: _Puzzle) -> Task:
        numbers, target, solution = puzzle
        use = "Use each number exactly once" if self.use_all else "Use each number at most once"
        question = (
            f"Using the numbers {', '.join(map(str, numbers))}, write an expression that equals {target}. "
            f"{use}, with the operators {' '.join(self.operators)} and parentheses."
        )
        return Task(
            id=key,
            env=self.name,
            prompt=opening(question, self.system, self.instruction),
            answer=solution,
            meta={"numbers": list(numbers), "target": target},
        )


_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def _combine(numbers: Sequence[int], operators: Sequence[str], rng: random.Random) -> tuple[int, str]:
    """Join numbers at random until one value is left, and the expression of it; 0 if an operator does not fit."""
    pool = [(number, str(number)) for number in numbers]
    while len(pool) > 1:
        left, left_text = pool.pop(rng.randrange(len(pool)))
        right, right_text = pool.pop(rng.randrange(len(pool)))
        symbol = operators[rng.randrange(len(operators))]
        if symbol == "/" and (not right or left % right):
            return 0, ""
        pool.append((_OPERATIONS[symbol](left, right), f"({left_text} {symbol} {right_text})"))
    return pool[0]
