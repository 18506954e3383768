"""Rows of chats to be imitated: messages, or a prompt and its completion."""

from __future__ import annotations

from tandem.envs.base import Split
from tandem.envs.data.rows import DataRow, DataSource
from tandem.envs.dataset import message
from tandem.errors import EnvError
from tandem.types import Json, Message, Task

NAME = "data"
"""What the tasks of such rows have as their environment."""


def chats(source: DataSource, split: Split) -> list[Task]:
    """A task for each row: its prompt is what comes before the first reply to be trained, ``meta`` has the whole.

    Raises:
        EnvError: a row has no reply; names its place.
    """
    return [_task(row, split) for row in source.rows(split, lambda row: repr(sorted(row.columns.items())))]


def _task(row: DataRow, split: Split) -> Task:
    if "messages" in row.columns:
        messages = _messages(row, "messages", "user")
        first = next((place for place, each in enumerate(messages) if each.role == "assistant"), 0)
    else:
        prompt = _messages(row, "prompt", "user")
        messages, first = (*prompt, *_messages(row, "completion", "assistant")), len(prompt)
    if not first or all(each.role != "assistant" for each in messages[first:]):
        raise EnvError(f"{row.where}: expected messages with an assistant's after a user's, or prompt and completion")
    return Task(
        id=f"{split}/{row.number}",
        env=NAME,
        prompt=messages[:first],
        answer=messages[-1].content,
        meta={"messages": messages, "tools": row.columns.get("tools") or ()},
    )


def _messages(row: DataRow, column: str, role: str) -> tuple[Message, ...]:
    """A column with a list of messages, or with the text of one."""
    value: Json = row.value(column)
    if not isinstance(value, list):
        return (Message(role=role, content=row.text(column)),)
    return tuple(message(item, row, column) for item in value)
