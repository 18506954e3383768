"""Data sets in ms-swift's forms, as tasks."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from tandem.envs.base import Split
from tandem.envs.dataset import Dataset
from tandem.types import Json, Task

KIND = f"{__name__}:SwiftDataset"
"""How a recipe names the environment."""
GOLD = "gold answer"
"""Column that the gold answer is put into, as text."""
TAGGED = "<think></think>\n<answer>\n{answer}\n</answer>"
"""A gold reply that ms-swift's format reward likes."""

_PROMPTS = ("query", "question", "problem", "instruction", "input")
"""Columns that hold the question where there are neither messages nor a prompt, the first that is there."""
_ANSWERS = ("answer", "response", "output")
"""Columns that hold the gold answer where there is no solution."""
_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, kw_only=True)
class SwiftDataset(Dataset):
    """Rows with messages, or with query and response; solution or answer is the gold answer."""

    name: ClassVar[str] = "swift"

    answer: str = GOLD
    """Column with the gold answer; that of ``transform`` is made of solution, answer, response or the last turn."""
    transform: str = f"{__name__}:row"
    """What brings ms-swift's forms into one."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of columns in the data, and what they are called here."""
    gold_reply: str = "{answer}"
    """How a right answer is said, to check rewards by; empty: they are not checked."""
    more_columns: tuple[str, ...] = ()
    """Columns of other data sets that the same rewards are for: they are null here."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """As of any rows; a column that only others have is null, so that rewards which name it can be called."""
        missing: dict[str, Json] = dict.fromkeys((*self.column_names(), *self.more_columns))
        return [replace(task, meta={**missing, **task.meta}) for task in super().tasks(split)]

    def column_names(self) -> list[str]:
        """Columns of all rows of ``path``, by their names here.

        Raises:
            EnvError: they cannot be read.
        """
        rows = replace(self, test_path=None, test_share=0.0).rows("train", self._key)
        names = dict.fromkeys(name for row in rows for name in row.columns)
        return [self.columns.get(name, name) for name in names]

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
        ValueError: it holds no question, or media, or tools.
    """
    if media := [name for name in _MEDIA if columns.get(name)]:
        raise ValueError(f"it has {media[0]}, and Tandem trains on text")
    if columns.get("tools"):
        raise ValueError("it has tools, which its prompt would not name; write them into the system message")
    messages = _messages(columns)
    reply = messages.pop().get("content") if messages and messages[-1].get("role") == "assistant" else None
    answers = [columns.get(name) for name in ("solution", *_ANSWERS)]
    gold = next((answer for answer in [*answers, reply] if answer is not None), "")
    return {**columns, "prompt": messages, "solution": gold, GOLD: gold if isinstance(gold, str) else str(gold)}


def _messages(columns: dict[str, Json]) -> list[dict[str, Any]]:
    """The conversation so far; a system message of its own column is its first, where it has none."""
    system = columns.get("system") or columns.get("system_prompt")
    opening = [{"role": "system", "content": system}] if system else []
    prompt = _listed("messages", columns) or columns.get("prompt")
    if isinstance(prompt, list):
        begun = isinstance(prompt[0], dict) and prompt[0].get("role") == "system" if prompt else False
        return [*([] if begun else opening), *prompt]
    question = prompt if isinstance(prompt, str | int | float) else _question(columns)
    question = str(question) if isinstance(question, int | float) else question  # of a CSV file
    messages: list[dict[str, Any]] = [*opening]
    for query, answered in _listed("history", columns):
        messages += [{"role": "user", "content": query}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]


def _question(columns: dict[str, Json]) -> Json:
    """The question of a row without messages; Alpaca's instruction goes before its input."""
    name = next((name for name in _PROMPTS if columns.get(name)), None)
    if name is None:
        has = ", ".join(columns) or "nothing"
        raise ValueError(f"it has no messages, prompt or {', '.join(_PROMPTS)}; it has {has}")
    if name == "instruction" and columns.get("input"):
        return f"{columns['instruction']}\n{columns['input']}"
    return columns[name]


def _listed(name: str, columns: dict[str, Json]) -> list[Any]:
    """A column's list, which a CSV file has as text; empty if there is none."""
    value = columns.get(name) or []
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            if isinstance(listed := read(value), list):
                return listed
    raise ValueError(f"its {name} is text, and no list: {value[:80]!r}")
