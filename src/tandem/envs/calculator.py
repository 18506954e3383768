"""Sums too large for the head, with a calculator to ask: several turns and a tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.envs._sums import SumTasks
from tandem.envs.base import Chat, Split
from tandem.envs.data.split import Tasks, opening, some
from tandem.errors import bounded
from tandem.expression import BadExpression, as_text, evaluate
from tandem.types import Message, Task

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)

_SYSTEM = (
    "You have a calculator. To use it, write an expression between <calc> and </calc>, such as <calc>12*34</calc>, "
    "and stop; its result comes back in the next message. When you know the answer, write it as a number."
)


@dataclass(frozen=True, kw_only=True)
class Calculator(SumTasks):
    """Sums of large numbers; the policy may ask a calculator by writing <calc>12*34</calc>."""

    operators: tuple[str, ...] = ("+", "-", "*")
    """Any of + - *."""
    min_number: int = 10
    """Smallest number."""
    max_number: int = 99
    """Largest number."""
    system: str = _SYSTEM
    """System message that explains the tool; empty: none."""
    max_turns: int = bounded(3, least=1)
    """Most times the policy speaks; a call in the last turn is not answered."""
    test_share: float = bounded(0.1, below=1)
    """Share of questions held out."""

    def tasks(self, split: Split) -> Sequence[Task]:
        remedy = f"there are {self.count} questions in all: widen the numbers, or change size or test_share"

        def task(number: int) -> Task:
            expression = self.expression(number)
            return self.task(expression, opening(self.question(expression), self.system))

        return Tasks(some(self.draw(split), self.name, split, remedy), task)

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        calls = errors = 0
        for turn in range(1, self.max_turns + 1):
            reply = await chat.reply()
            if not (expressions := _CALL.findall(reply.content)):
                break
            calls += 1
            result, understood = _compute(expressions[-1])
            errors += not understood
            if turn == self.max_turns or not chat.open:
                break
            chat.add(Message(role="user", content=result))
        return {"tool_calls": float(calls), "tool_errors": float(errors)}

    def check(self, task: Task) -> str:
        return task.answer


def _compute(expression: str) -> tuple[str, bool]:
    """What the calculator says, and whether it understood."""
    try:
        return f"<result>{as_text(evaluate(expression).value)}</result>", True
    except BadExpression as error:
        return f"<error>{error}</error>", False
