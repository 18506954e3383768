"""Data sets in ms-swift's forms, as tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.envs.dataset import Dataset
from tandem.types import Json, Task

KIND = f"{__name__}:SwiftDataset"
"""How a recipe names the environment."""
GOLD = "gold answer"
"""Column that the gold answer is put into, as text."""
TAGGED = "<think></think>\n<answer>\n{answer}\n</answer>"
"""A gold reply that ms-swift's format reward likes."""

_PROMPTS = ("query", "question", "problem", "instruction")
"""Columns that hold the question where there are neither messages nor a prompt, the first that is there."""
_ANSWERS = ("answer", "response", "output")
"""Columns that hold the gold answer where there is no solution."""
_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, kw_only=True)
class SwiftDataset(Dataset):
    """Rows with messages, or with query and response; solution or answer is the gold answer."""

    answer: str = GOLD
    """Column with the gold answer; that of ``transform`` is made of solution, answer, response or the last turn."""
    transform: str = f"{__name__}:row"
    """What brings ms-swift's forms into one."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of columns in the data, and what they are called here."""
    gold_reply: str = "{answer}"
    """How a right answer is said, to check rewards by; empty: they are not checked."""

    @property
    def name(self) -> str:
        return "swift"

    def _change(self) -> Callable[[dict[str, Json]], Any] | None:
        change = super()._change()
        return change and (lambda row: change({self.columns.get(name, name): value for name, value in row.items()}))

    def check(self, task: Task) -> str | None:
        """No reply is known to a task without an answer."""
        return self.gold_reply.replace("{answer}", task.answer) if task.answer and self.gold_reply else None


def row(columns: dict[str, Json]) -> dict[str, Json]:
    """A row with ``prompt`` (messages), ``solution`` and the gold answer as text besides its own columns.

    The last answer of a conversation is the gold one where there is no column with it, and never in the prompt.

    Raises:
        ValueError: it holds no question, or media.
    """
    if media := [name for name in _MEDIA if columns.get(name)]:
        raise ValueError(f"it has {media[0]}, and Tandem trains on text")
    messages = _messages(columns)
    reply = None
    if messages and messages[-1].get("role") == "assistant":
        reply = messages.pop().get("content")
    answers = [columns.get(name) for name in ("solution", *_ANSWERS)]
    gold = next((answer for answer in [*answers, reply] if answer is not None), "")
    return {**columns, "prompt": messages, "solution": gold, GOLD: gold if isinstance(gold, str) else str(gold)}


def _messages(columns: dict[str, Json]) -> list[dict[str, Any]]:
    """The conversation so far."""
    prompt = columns.get("messages") or columns.get("prompt")
    if isinstance(prompt, list):
        return list(prompt)
    question = prompt if isinstance(prompt, str) else next((columns[n] for n in _PROMPTS if columns.get(n)), None)
    if question is None:
        has = ", ".join(columns) or "nothing"
        raise ValueError(f"it has no messages, prompt or {', '.join(_PROMPTS)}; it has {has}")
    messages: list[dict[str, Any]] = []
    if columns.get("system"):
        messages.append({"role": "system", "content": columns["system"]})
    for query, answered in columns.get("history") or []:
        messages += [{"role": "user", "content": query}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]
