"""Format reward: a regular expression, or tags in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from tandem.errors import ConfigError
from tandem.rewards.base import Reward
from tandem.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Format(Reward):
    """1 if the reply has the required format, else 0. Set pattern or tags."""

    judges_form: ClassVar[bool] = True

    pattern: str = ""
    """Regular expression to be found somewhere in the trimmed reply; (?s) and (?m) work."""
    tags: tuple[str, ...] = ()
    """Names of tags such as think and answer: each <tag>...</tag> once, closed, in this order."""

    def __post_init__(self) -> None:
        if bool(self.pattern) == bool(self.tags):
            raise ConfigError("format needs either pattern or tags" + (", not both" if self.pattern else ""))
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"pattern {self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, rollout: Rollout) -> float:
        reply = rollout.final_message.strip()
        return float(re.search(self.pattern, reply) is not None if self.pattern else self._tagged(reply))

    def phrase(self, answer: str) -> str:
        if not self.tags or self._tagged(answer):
            return answer
        home = "answer" if "answer" in self.tags else self.tags[-1]
        return "\n".join(f"<{tag}>\n{answer if tag == home else ''}\n</{tag}>" for tag in self.tags)

    def _tagged(self, reply: str) -> bool:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        places = [reply.find(mark) for mark in marks]
        return min(places) >= 0 and places == sorted(places) and all(reply.count(mark) == 1 for mark in marks)
