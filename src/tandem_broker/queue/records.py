"""Records that enter and leave the broker's store. Plain data: no clock, no file, no JSON.

Times are seconds of whatever clock the caller passes as ``now`` (the server passes Unix time). A *sequence* is one
rollout, a *group* holds several sequences of one prompt, a *batch* is groups of exactly ``batch_size`` sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tandem.errors import BrokerError
from tandem_broker.protocol.submission import GroupEntry

State = Literal["buffered", "queued", "leased", "trained", "dropped"]
"""buffered: waits for others of its environment to make up a group size; leased: a trainer has it."""


REMEMBERED = 1_000
"""Batches that are over and still known by name."""


class GroupRefused(BrokerError):
    """The offered group can never be used; sending it again will not help (422)."""


class Busy(BrokerError):
    """Too much is queued; the same submission is welcome later (429, or 503 for clients that drop on a 4xx)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Bounds and patience of a store."""

    max_groups: int = 200_000
    """Most groups held (buffered, queued and leased) before submissions are put off."""
    max_bytes: int = 2 << 30
    """Most payload bytes held before submissions are put off; they are in memory."""
    max_env_bytes: int = 1 << 30
    """Most payload bytes held of one environment; anonymous submissions count as one environment."""
    max_environments: int = 10_000
    """Most environments known; beyond it one that is gone and holds nothing is forgotten."""
    heartbeat_seconds: float = 60.0
    """An environment not heard from for this long has no weight and no minimum share until it is heard again."""
    key_seconds: float = 86_400.0
    """How long an idempotency key is remembered."""
    max_keys: int = 200_000
    """Most idempotency keys remembered; the oldest are forgotten first."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an accepted submission."""

    kind: Literal["received", "buffered", "duplicate"]
    """duplicate: its key was accepted before, nothing was added."""
    buffered: int = 0
    """Sequences left in the environment's buffer after this submission (0: it completed a set, or none waits)."""


class ServedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of exactly ``batch_size`` sequences."""

    id: str
    """Name for ``acknowledge``, ``renew`` and ``return_lease``."""
    entries: tuple[GroupEntry, ...]
    """In order of arrival, groups of equal size beside each other as far as needed to fill up the largest."""


class BatchLease(msgspec.Struct, eq=False):
    """A batch that was served; a journal keeps it as it is."""

    id: str
    orders: list[int]
    """Places of its groups in the order of arrival; empty once it is acknowledged."""
    seconds: float | None
    """How long it may stay unacknowledged; None: a trainer that never acknowledges has it."""
    expires: float | None
    answer: str | None = None
    """To its acknowledgement, for one that is repeated."""


class Journal:
    """Gets the changes that must survive a crash, in order. This one keeps nothing: its store lives in memory alone."""

    def added(self, order: int, entry: GroupEntry, state: State) -> None:
        """An entry was accepted at place ``order`` of the arrival order."""

    def moved(self, orders: Sequence[int], state: State, batch: str | None) -> None:
        """Entries changed state; trained and dropped ones will not be asked for again."""

    def noted(self, name: str, value: Any) -> None:
        """A fact (JSON) replaced the earlier one of that name; None removes it."""

    def cleared(self) -> None:
        """Everything was reset."""

    def flush(self) -> None:
        """Make every change so far survive a crash, if that is possible."""

    async def committed(self) -> None:
        """Wait until every change so far would survive a crash."""
