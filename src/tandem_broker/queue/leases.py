"""Batches that trainers have, and the keys of submissions: what is remembered so that nothing counts twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem_broker.queue.records import Acknowledgement, StoreOptions
from tandem_broker.queue.tenants import Item

REMEMBERED = 1_000
"""Batches that are over and still known by name."""
NOTED = ("step", "trainer", "seconds", "delivered")
"""Attributes of a lease that a restart must know, beside its groups and its outcome."""


class BatchLease(msgspec.Struct, eq=False):
    """A batch that was served."""

    id: str
    items: list[Item]
    """Its groups; empty once it is over and settled."""
    step: int
    """The broker's step with it."""
    trainer: str | None
    seconds: float | None
    """How long it may stay unacknowledged; None: a trainer that never acknowledges has it."""
    expires: float | None
    delivered: bool = False
    """Its answer went out whole: after a restart a trainer that never acknowledges still has it."""
    gone: list[int] = msgspec.field(default_factory=list)
    """Places of groups that another batch trained, or that were dropped, before a restart."""
    outcome: Acknowledgement | None = None
    """The answer to its acknowledgement, for one that is repeated."""

    def facts(self) -> dict[str, Any]:
        """What a journal keeps."""
        orders = [item.order for item in self.items] + self.gone
        facts = {name: getattr(self, name) for name in NOTED}
        return {"orders": orders, "outcome": msgspec.to_builtins(self.outcome), **facts}


def lease_of(name: str, facts: Mapping[str, Any], held: Mapping[int, Item], now: float) -> BatchLease:
    """The lease a journal kept; its time begins anew. ``held`` is every group there is, by its place."""
    seconds, outcome = facts["seconds"], facts["outcome"]
    return BatchLease(
        id=name,
        items=[held[order] for order in facts["orders"] if order in held],
        expires=None if seconds is None else now + seconds,
        gone=[order for order in facts["orders"] if order not in held],
        outcome=None if outcome is None else Acknowledgement(**outcome),
        **{name: facts[name] for name in NOTED},
    )


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


class IdempotencyKeys:
    """The keys of the last ``StoreOptions.key_seconds`` and the last ``StoreOptions.max_keys`` submissions."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._at: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def __len__(self) -> int:
        return len(self._at)

    def add(self, key: str, now: float) -> None:
        """A submission with this key was accepted."""
        self._at[key] = now

    def forget(self, now: float) -> None:
        """Those that are too old or too many."""
        while self._at:
            oldest, at = next(iter(self._at.items()))
            if len(self._at) <= self._options.max_keys and now - at <= self._options.key_seconds:
                return
            del self._at[oldest]
