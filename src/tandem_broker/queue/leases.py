"""Batches that trainers have, and the keys of submissions: what is remembered so that nothing counts twice."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from tandem_broker.queue.records import StoreOptions

REMEMBERED = 1_000
"""Batches that are over and still known by name."""


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an acknowledgement. True in a condition if the whole batch is trained, and by this batch alone."""

    ok: bool
    trained: int = 0
    """Groups that this acknowledgement marked as trained."""
    already: int = 0
    """Groups that another batch's acknowledgement had marked before: they were trained twice."""
    reason: str = ""
    """For a person; empty when nothing is unusual."""

    def __bool__(self) -> bool:
        return self.ok


class BatchLease(msgspec.Struct, eq=False):
    """A batch that was served; a journal keeps it as it is."""

    id: str
    orders: list[int]
    """Places of its groups in the order of arrival; empty once it is acknowledged."""
    step: int
    """The broker's step with it."""
    trainer: str | None
    seconds: float | None
    """How long it may stay unacknowledged; None: a trainer that never acknowledges has it."""
    expires: float | None
    delivered: bool = False
    """Its answer went out whole: after a restart a trainer that never acknowledges still has it."""
    outcome: Acknowledgement | None = None
    """The answer to its acknowledgement, for one that is repeated."""


class Leases:
    """Leases that are out, and the last ones that are over (acknowledged, expired, returned), by name."""

    def __init__(self) -> None:
        self.out: dict[str, BatchLease] = {}
        self.over: OrderedDict[str, BatchLease] = OrderedDict()  # oldest first

    def end(self, lease: BatchLease) -> str | None:
        """It is over. Returns the name of one to forget, if too many are remembered."""
        self.out.pop(lease.id, None)
        self.over[lease.id] = lease
        self.over.move_to_end(lease.id)
        return self.over.popitem(last=False)[0] if len(self.over) > REMEMBERED else None

    def expired(self, now: float) -> list[BatchLease]:
        """Those out whose time is up."""
        return [lease for lease in self.out.values() if lease.expires is not None and lease.expires <= now]

    def of_plain(self, trainer: str | None) -> list[BatchLease]:
        """Those that a trainer which never acknowledges has."""
        return [lease for lease in self.out.values() if lease.delivered and lease.trainer == trainer]


class IdempotencyKeys(OrderedDict[str, float]):
    """When each key was accepted: those of the last ``key_seconds``, and ``max_keys`` at most."""

    def forget(self, now: float, options: StoreOptions) -> list[str]:
        """Forget and return those that are too old or too many."""
        forgotten: list[str] = []
        while self and (len(self) > options.max_keys or now - next(iter(self.values())) > options.key_seconds):
            forgotten.append(self.popitem(last=False)[0])
        return forgotten
