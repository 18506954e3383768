"""Sums such as "What is 3 + 4?": the smallest task on which a model visibly learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.envs._sums import Sums, worth
from tandem.envs.base import Environment, Split
from tandem.envs.data.split import Tasks, check_share, opening, some
from tandem.errors import ConfigError
from tandem.types import Json, Message, Task


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Environment):
    """Sums such as "What is 3 + 4?"; no data needed, and every question is either trained on or held out."""

    operators: tuple[str, ...] = ("+",)
    """Any of + - *."""
    terms: int = 2
    """Numbers in one question."""
    min_number: int = 1
    """Smallest number."""
    max_number: int = 9
    """Largest number."""
    prompt: str = "What is {expression}?"
    """The question; {expression} stands for the sum."""
    instruction: str = ""
    """Added beneath every question."""
    system: str = ""
    """System message; empty: none."""
    examples: int = 0
    """Worked examples before every question, as earlier turns of the chat; they are not trained on themselves."""
    reply: str = "{expression} = {answer}"
    """How worked examples are answered; {expression} and {answer} are filled in."""
    size: int = 10_000
    """Most questions, both splits together; fewer if the numbers allow no more."""
    test_share: float = 0.2
    """Share of questions held out."""
    seed: int = 0
    """Which questions are drawn, and their order."""

    def __post_init__(self) -> None:
        if "{expression}" not in self.prompt:
            raise ConfigError(f"prompt must contain {{expression}}, got {self.prompt!r}")
        if "{answer}" not in self.reply:
            raise ConfigError(f"reply must contain {{answer}}, got {self.reply!r}")
        if self.examples < 0:
            raise ConfigError(f"examples must be at least 0, got {self.examples}")
        if self.size < 1:
            raise ConfigError(f"size must be at least 1, got {self.size}")
        check_share(self.test_share)
        self._sums()

    @property
    def default_rewards(self) -> Mapping[str, Json]:
        return {"number": 1.0}

    def tasks(self, split: Split) -> Sequence[Task]:
        sums = self._sums()
        drawn = sums.draw(self.size, self.seed, "train", self.test_share)
        shown = tuple(m for number in drawn[: self.examples] for m in self._worked(sums.expression(number)))
        rows = drawn[self.examples :] if split == "train" else sums.draw(self.size, self.seed, "test", self.test_share)
        remedy = f"there are {sums.count} questions in all: widen the numbers, or change size, examples or test_share"
        return Tasks(some(rows, self.name, split, remedy), lambda number: self._task(sums.expression(number), shown))

    def check(self, task: Task) -> str:
        return self._answered(task.meta["expression"], task.answer)

    def _sums(self) -> Sums:
        return Sums(operators=self.operators, terms=self.terms, low=self.min_number, high=self.max_number)

    def _task(self, expression: str, shown: tuple[Message, ...]) -> Task:
        *system, question = self._question(expression)
        return Task(
            id=expression.replace(" ", ""),
            env=self.name,
            prompt=(*system, *shown, question),
            answer=worth(expression),
            meta={"expression": expression},
        )

    def _question(self, expression: str) -> tuple[Message, ...]:
        return opening(self.prompt.replace("{expression}", expression), self.system, self.instruction)

    def _worked(self, expression: str) -> tuple[Message, Message]:
        return self._question(expression)[-1], Message(
            role="assistant", content=self._answered(expression, worth(expression))
        )

    def _answered(self, expression: str, answer: str) -> str:
        return self.reply.replace("{expression}", expression).replace("{answer}", answer)

    def inert(self) -> Mapping[str, str]:
        """Options that change nothing, and why."""
        return {} if self.examples else {"reply": "there are no worked examples"}
