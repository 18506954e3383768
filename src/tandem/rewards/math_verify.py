r"""Mathematical equality by the math-verify library: 1/2, 0.5 and \frac{1}{2} are the same answer."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

from tandem.errors import ConfigError, RewardError
from tandem.rewards._answers import final_message, last_tag
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class MathVerify(Reward):
    """1 if the reply's final expression (LaTeX, boxed or plain) equals the gold answer; else 0."""

    pure: ClassVar[bool] = True

    marker: str = "####"
    """If the reply has this text, only the line after its last one is read; else what is in its last <answer> tag, if
    it has one, and then the whole reply. Empty: there is no such text."""
    least_working: int = 0
    """Characters, blanks left out, that must stand before the marker (without one, in the whole reply) for the answer
    to count: a bare answer is a guess."""
    timeout: int = 3
    """Seconds for parsing and again for comparing, after which the reply counts as wrong."""

    def __post_init__(self) -> None:
        if self.timeout < 1:
            raise ConfigError(f"timeout must be at least 1, got {self.timeout}")
        if self.least_working < 0:
            raise ConfigError(f"least_working must be at least 0, got {self.least_working}")

    def prepare(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise RewardError("reward math_verify needs math-verify; pip install 'tandem-rl[math]'") from error
        for name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
            logging.getLogger(name).setLevel(logging.ERROR)  # a reply that takes too long is an everyday thing
        math_verify.verify(self._parsed(r"$\frac{1}{2}$"), self._parsed("0.5"))  # its parsers load on first use

    def __call__(self, rollout: Rollout) -> float:
        import math_verify

        if not self._worked(final_message(rollout)):
            return 0.0
        gold, reply = self._relevant(rollout.task.answer), self._relevant(final_message(rollout))
        if reply == gold:
            return 1.0
        # The library reads bare LaTeX only between dollars, and a gold answer is often written without.
        expected = ([] if "$" in gold else self._parsed(f"${gold}$")) or self._parsed(gold)
        if not expected:
            raise ValueError(f"math-verify cannot read the gold answer {gold!r} of task {rollout.task.id}")
        return float(math_verify.verify(expected, self._parsed(reply), timeout_seconds=self._seconds()))

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

    def _parsed(self, text: str) -> list[Any]:
        import math_verify

        parsed: list[Any] = math_verify.parse(text, parsing_timeout=self._seconds())
        return parsed

    def _seconds(self) -> int | None:
        """The library's deadline is a signal, which only a main thread can receive; elsewhere there is none."""
        return self.timeout if threading.current_thread() is threading.main_thread() else None
