"""Train and test split by a hash of the question, so no option and no seed moves a question into training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

from tandem.envs.base import Split
from tandem.errors import EnvError
from tandem.types import Message, Task

Row = TypeVar("Row")


def digest(key: str) -> str:
    """Twelve hex digits that stand for a question."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def split_of(key: str, test_share: float) -> Split:
    """The split a question belongs to."""
    return "test" if int(digest(key), 16) < test_share * 2**48 else "train"


def opening(question: str, system: str = "", instruction: str = "") -> tuple[Message, ...]:
    """The messages that pose a question: a system message if there is one, then the user's."""
    text = f"{question}\n{instruction}" if instruction else question
    user = Message(role="user", content=text)
    return (Message(role="system", content=system), user) if system else (user,)


class Tasks(Sequence[Task], Generic[Row]):
    """Lazy sequence of tasks, made from compact rows on access."""

    def __init__(self, rows: Sequence[Row], make: Callable[[Row], Task]) -> None:
        self._rows = rows
        self._make = make

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Tasks[Row]: ...
    def __getitem__(self, index: int | slice) -> Task | Tasks[Row]:
        if isinstance(index, slice):
            return Tasks(self._rows[index], self._make)
        return self._make(self._rows[index])


def some(rows: Sequence[Row], env: str, split: Split, remedy: str) -> Sequence[Row]:
    """The rows, of which there must be at least one.

    Raises:
        EnvError: there are none.
    """
    if not rows:
        raise EnvError(f"{env} has no {split} tasks; {remedy}")
    return rows
