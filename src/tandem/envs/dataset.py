"""Data set environment: JSONL, CSV or Parquet on disk, or a name on the hub."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.envs.base import Environment, Split
from tandem.envs.data.rows import DataRow, DataSource
from tandem.envs.data.split import opening, some
from tandem.errors import ConfigError, EnvError
from tandem.importing import importing
from tandem.types import TEXT, Json, Message, Task

_PLACE = re.compile(r"\{\{|\}\}|\{([^{}\n]+)\}")
"""A doubled brace, which stands for itself, or a column's name in braces, as in Python's ``str.format``."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Dataset(DataSource, Environment):
    """Rows of a JSONL, CSV or Parquet file or of a hub data set, one task a row."""

    prompt: str = "prompt"
    """Column with the question or a list of messages; or a text with {column} in it, where {{ and }} are braces."""
    chat: bool = True
    """The question is a user's message; false: it is a text that the policy goes on with as it stands, which has every
    special token that is wanted."""
    answer: str = "answer"
    """Column with the gold answer, for rewards that compare, such as reward_model.ground_truth; empty: the data has
    none."""
    system: str = ""
    """System message; empty: none."""
    instruction: str = ""
    """Added beneath every question."""
    transform: str = ""
    """``pkg.mod:fn`` that takes a row's columns and returns them changed, or None to leave the row out."""

    def __post_init__(self) -> None:
        if self.system and not self.chat:
            raise ConfigError("system needs a chat; with chat: false write it into the prompt")
        super().__post_init__()

    def tasks(self, split: Split) -> Sequence[Task]:
        tasks = [self._task(row, split) for row in self._rows(split)]
        remedy = "add rows, change test_share, name a test set, or look at what transform leaves out"
        return some(tasks, f"{self.name} ({self.path})", split, remedy)

    def check(self, task: Task) -> str | None:
        return task.answer if self.answer else None

    def _rows(self, split: Split) -> Iterator[DataRow]:
        """Rows of a split, transformed after the split is decided."""
        change = self._change()
        for row in self.rows(split, self._key):
            new = changed(row, change, self.transform) if change else row
            if new is not None:
                yield new

    def _change(self) -> Callable[[dict[str, Json]], Any] | None:
        """What changes a row's columns, or leaves the row out by None; None changes nothing."""
        return imported("transform", self.transform) if self.transform else None

    def _key(self, row: DataRow) -> str:
        """What the split hashes: the data beneath the prompt, so that new wording moves no row into training."""
        if self.transform:
            return repr(sorted(row.columns.items()))
        return repr([row.value(column) for column in self._columns or [self.prompt]])

    def _task(self, row: DataRow, split: Split) -> Task:
        return Task(
            id=f"{split}/{row.number}",
            env=self.name,
            prompt=self._prompt(row),
            answer=row.text(self.answer) if self.answer else "",
            meta=row.columns,
        )

    @property
    def _columns(self) -> list[str]:
        """Columns that the prompt's text names; none where it is a column's name itself."""
        return [column for column in _PLACE.findall(self.prompt) if column]

    def _prompt(self, row: DataRow) -> tuple[Message, ...]:
        if self._columns:
            text = _PLACE.sub(lambda m: row.text(m[1]) if m[1] else m[0][0], self.prompt)
            if self.answer in self._columns and row.value(self.answer) not in ("", None):
                raise EnvError(
                    f"{row.where}: {{{self.answer}}} puts the gold answer into the prompt: {text[-200:]!r}; for a word "
                    f"in braces write {{{{{self.answer}}}}}, and if rewards do not compare with it set answer: ''"
                )
            return self._opening(text)
        value = row.value(self.prompt)
        if not isinstance(value, list) or not self.chat:
            return self._opening(row.text(self.prompt))
        messages = tuple(message(item, row, self.prompt) for item in value)
        if not messages or messages[-1].role == "assistant":
            last = "an assistant's message" if messages else "nothing"
            raise EnvError(f"{row.where}: column {self.prompt!r} should end with a user's message, got {last}")
        if self.instruction:
            last_content = f"{messages[-1].content}\n{self.instruction}"
            messages = (*messages[:-1], replace(messages[-1], content=last_content))
        if self.system and messages[0].role != "system":
            messages = (Message(role="system", content=self.system), *messages)
        return messages

    def _opening(self, text: str) -> tuple[Message, ...]:
        if self.chat:
            return opening(text, self.system, self.instruction)
        return (Message(role=TEXT, content=f"{text}\n{self.instruction}" if self.instruction else text),)


def message(item: Json, row: DataRow, column: str) -> Message:
    """A message with all that the chat template may read; in a table a field that a message lacks is null."""
    expected = f"{row.where}: column {column!r} should be a list of messages, each with role and content (text)"
    if not isinstance(item, dict) or item.get("role") not in _ROLES:
        raise EnvError(f"{expected}; role must be one of {', '.join(_ROLES)}, got {str(item)[:80]!r}")
    content = item.get("content")
    fields = {name: value for name, value in item.items() if name not in ("role", "content") and value is not None}
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    elif content is None and fields.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise EnvError(f"{expected}, got {str(item)[:80]!r}; only text can be trained on")
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(fields["tool_calls"], f"{row.where}: tool_calls of column {column!r}")
    return Message(role=item["role"], content=content, fields=fields)


def _calls(calls: Any, whose: str) -> list[Json]:
    """Tool calls whose arguments are a mapping, as chat templates take them; OpenAI's are JSON text."""
    read: list[Json] = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise EnvError(
                f"{whose} should be a list, each with a function's name and arguments, got {str(calls)[:80]!r}"
            )
        arguments: Json = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            raise EnvError(f"{whose}: the arguments of {function['name']} are no JSON: {arguments[:80]!r}") from error
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def imported(option: str, path: str) -> Callable[..., Any]:
    """The function that an option names.

    Raises:
        EnvError: it cannot be imported or is no function.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with importing():
            function = pkgutil.resolve_name(path)
    except Exception as error:  # user code may raise anything while it is imported; the message carries it
        raise EnvError(f"{option} {path!r} cannot be imported: {error}; write pkg.module:function") from error
    if not callable(function):
        raise EnvError(f"{option} {path!r} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


def changed(row: DataRow, change: Callable[[dict[str, Json]], Any], path: str) -> DataRow | None:
    """The row after its transform; None if that leaves it out."""
    try:
        columns = change(dict(row.columns))
    except Exception as error:  # user code; one row's failure names that row
        raise EnvError(f"{row.where}: transform {path} raised {type(error).__name__}: {error}") from error
    if columns is None:
        return None
    if not isinstance(columns, dict):
        raise EnvError(f"{row.where}: transform {path} returned {type(columns).__name__}, expected the row or None")
    return replace(row, columns=columns)
