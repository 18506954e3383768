"""Sums such as "What is 3 + 4?": the smallest task on which a model visibly learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.envs._sums import SumTasks, worth
from tandem.envs.base import Split
from tandem.envs.data.split import Tasks, opening, some
from tandem.errors import bounded
from tandem.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class Arithmetic(SumTasks):
    """Sums such as "What is 3 + 4?"; no data needed, and every question is either trained on or held out."""

    instruction: str = ""
    """Added beneath every question."""
    system: str = ""
    """System message; empty: none."""
    examples: int = bounded(0)
    """Worked examples before every question, as earlier turns of the chat; they are not trained on themselves."""

    def tasks(self, split: Split) -> Sequence[Task]:
        drawn = self.draw("train")
        shown = tuple(m for number in drawn[: self.examples] for m in self._worked(self.expression(number)))
        rows = drawn[self.examples :] if split == "train" else self.draw("test")
        remedy = f"there are {self.count} questions in all: widen the numbers, or change size, examples or test_share"

        def task(number: int) -> Task:
            *system, question = self._opening(expression := self.expression(number))
            return self.task(expression, (*system, *shown, question))

        return Tasks(some(rows, self.name, split, remedy), task)

    def check(self, task: Task) -> str:
        return f"{task.meta['expression']} = {task.answer}"

    def _opening(self, expression: str) -> tuple[Message, ...]:
        return opening(self.question(expression), self.system, self.instruction)

    def _worked(self, expression: str) -> tuple[Message, Message]:
        answer = f"{expression} = {worth(expression)}"
        return self._opening(expression)[-1], Message(role="assistant", content=answer)
