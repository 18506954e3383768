r"""Mathematical equality by the math-verify library: 1/2, 0.5 and \frac{1}{2} are the same answer."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import RewardError, bounded
from tandem.importing import library
from tandem.rewards._answers import in_tag, last_tag
from tandem.rewards.base import Reward
from tandem.types import Rollout

_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,11}")
"""A whole number in the only way to write it."""


@dataclass(frozen=True, kw_only=True)
class MathVerify(Reward):
    """1 if the reply's final expression (LaTeX, boxed or plain) equals the gold answer; else 0."""

    marker: str = "####"
    """If the reply has this text, only the line after its last one is read; else what is in its last <answer> tag, if
    it has one, and then the whole reply. Empty: there is no such text."""
    least_working: int = bounded(0)
    """Characters, blanks left out, that must stand before the marker (without one, in the whole reply) for the answer
    to count: a bare answer is a guess."""
    timeout_seconds: int = bounded(3, least=1)
    """Seconds for parsing and again for comparing, after which the reply counts as wrong."""

    def prepare(self) -> None:
        library("math_verify", "reward math_verify", "math", RewardError)
        for name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
            logging.getLogger(name).setLevel(logging.ERROR)  # a reply that takes too long is an everyday thing
        _equal(_parsed(r"$\frac{1}{2}$", self._seconds()), "0.5", self._seconds())  # its parsers load on first use

    def __call__(self, rollout: Rollout) -> float:
        if not self._worked(rollout.final_message):
            return 0.0
        gold, reply = self._relevant(rollout.task.answer), self._relevant(rollout.final_message)
        if reply == gold:
            return 1.0
        if _WHOLE.fullmatch(gold) and _WHOLE.fullmatch(reply):
            return 0.0  # two different numbers, written in the only way that they can be: the library need not say so
        try:
            expected = _expected(gold, self._seconds())
        except LookupError as error:
            raise ValueError(f"{error} of task {rollout.task.id}") from None
        return _equal(expected, reply, self._seconds())

    def phrase(self, answer: str) -> str:
        if self._worked(answer):
            return answer
        if self.marker:
            marked = answer if self.marker in answer else f"{self.marker} {answer}"
        else:
            marked = in_tag(answer, "answer")
        return f"{'.' * self.least_working}\n{marked}"

    def _worked(self, reply: str) -> bool:
        """Whether there is as much working as is asked for."""
        working = reply.rpartition(self.marker)[0] if self.marker and self.marker in reply else reply
        return len("".join(working.split())) >= self.least_working

    def _relevant(self, text: str) -> str:
        """What stands on the line after the last marker, or in the last answer tag, or everything."""
        if self.marker and self.marker in text:
            return text.rpartition(self.marker)[2].strip().partition("\n")[0].strip()
        tagged = last_tag(text, "answer")
        return text.strip() if tagged is None else tagged

    def _seconds(self) -> int | None:
        """The library's deadline is a signal, which only a main thread can receive; elsewhere there is none."""
        return self.timeout_seconds if threading.current_thread() is threading.main_thread() else None


@functools.lru_cache(maxsize=4096)
def _expected(gold: str, seconds: int | None) -> tuple[Any, ...]:
    """A gold answer as the library reads it, once for all siblings; raises LookupError if it cannot."""
    # It reads bare LaTeX only between dollars, and a gold answer is often written without.
    parsed = ([] if "$" in gold else _parsed(f"${gold}$", seconds)) or _parsed(gold, seconds)
    if not parsed:
        raise LookupError(f"math-verify cannot read the gold answer {gold!r}")
    return tuple(parsed)


def _equal(expected: Sequence[Any], reply: str, seconds: int | None) -> float:
    import math_verify

    return float(math_verify.verify(list(expected), _parsed(reply, seconds), timeout_seconds=seconds))


def _parsed(text: str, seconds: int | None) -> list[Any]:
    import math_verify

    parsed: list[Any] = math_verify.parse(text, parsing_timeout=seconds)
    return parsed
