"""Countdown verifier: an expression over given numbers that must equal a target."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tandem.errors import bounded
from tandem.expression import BadExpression, evaluate
from tandem.rewards._answers import in_tag, last_tag
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class CountdownReward(Reward):
    """1 if the expression equals meta["target"] with the numbers of meta["numbers"]; else ``partial`` or 0."""

    use: Literal["all", "some"] = "all"
    """all: each number exactly once. some: each at most once."""
    partial: float = bounded(0.0, below=1)
    """For an expression that uses the numbers rightly but has another value."""
    tag: str = "answer"
    """The expression stands in the last <tag>...</tag>; without one, or if empty, on the last line."""

    def __call__(self, rollout: Rollout) -> float:
        meta = rollout.task.meta
        if "numbers" not in meta or "target" not in meta:
            raise ValueError(
                f"task {rollout.task.id} needs meta['numbers'] and meta['target']; it has: {', '.join(meta)}"
            )
        try:
            expression = evaluate(self._written(rollout.final_message), "+-*/")
        except BadExpression:
            return 0.0
        numbers, allowed = Counter(expression.numbers), Counter(map(Fraction, meta["numbers"]))
        if not (numbers == allowed if self.use == "all" else numbers <= allowed):
            return 0.0
        return 1.0 if expression.value == Fraction(meta["target"]) else self.partial

    def phrase(self, answer: str) -> str:
        return in_tag(answer, self.tag)

    def _written(self, reply: str) -> str:
        """The expression as written; of an equation, the side before the equals sign."""
        tagged = last_tag(reply, self.tag) if self.tag else None
        lines = (reply if tagged is None else tagged).strip().splitlines() or [""]
        return lines[-1].partition("=")[0].strip()
