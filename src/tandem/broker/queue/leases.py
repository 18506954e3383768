"""Batches that trainers have, and what became of earlier ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.broker.queue.records import Acknowledgement
from tandem.broker.queue.tenants import Item

REMEMBERED = 1_000
"""Batches that are over and still known by name."""


@dataclass(slots=True, eq=False)
class Lease:
    """A batch that was served."""

    id: str
    """Name of the batch."""
    items: list[Item]
    """Its groups; empty once it is over and settled."""
    step: int
    """The broker's step with it."""
    trainer: str | None
    """Who took it."""
    seconds: float | None
    """How long it may stay unacknowledged; None: a trainer that never acknowledges has it."""
    expires: float | None
    """When it runs out."""
    delivered: bool = False
    """Its answer went out whole: after a restart a trainer that never acknowledges still has it."""
    gone: list[int] = field(default_factory=list)
    """Places of groups that another batch trained, or that were dropped, before a restart."""
    outcome: Acknowledgement | None = None
    """The answer to its acknowledgement, for one that is repeated."""

    def facts(self) -> dict[str, Any]:
        """What a journal keeps."""
        return {
            "orders": [item.order for item in self.items] + self.gone,
            "step": self.step,
            "trainer": self.trainer,
            "seconds": self.seconds,
            "delivered": self.delivered,
            "outcome": None if self.outcome is None else asdict(self.outcome),
        }


def lease_of(name: str, facts: Mapping[str, Any], held: Mapping[int, Item], now: float) -> Lease:
    """The lease a journal kept; its time begins anew. ``held`` is every group there is, by its place."""
    seconds, outcome = facts["seconds"], facts["outcome"]
    return Lease(
        id=name,
        items=[held[order] for order in facts["orders"] if order in held],
        step=facts["step"],
        trainer=facts["trainer"],
        seconds=seconds,
        expires=None if seconds is None else now + seconds,
        delivered=facts["delivered"],
        gone=[order for order in facts["orders"] if order not in held],
        outcome=None if outcome is None else Acknowledgement(**outcome),
    )


@dataclass(slots=True)
class Leases:
    """Those that are out, and the last ones that are over (acknowledged, expired, released)."""

    out: dict[str, Lease] = field(default_factory=dict)
    """By name, in the order served."""
    over: OrderedDict[str, Lease] = field(default_factory=OrderedDict)
    """By name, oldest first."""

    def end(self, lease: Lease) -> str | None:
        """It is over. Returns the name of one to forget, if too many are remembered."""
        self.out.pop(lease.id, None)
        self.over[lease.id] = lease
        self.over.move_to_end(lease.id)
        return self.over.popitem(last=False)[0] if len(self.over) > REMEMBERED else None

    def expired(self, now: float) -> list[Lease]:
        """Those out whose time is up."""
        return [lease for lease in self.out.values() if lease.expires is not None and lease.expires <= now]

    def of_plain(self, trainer: str | None) -> list[Lease]:
        """Those that a trainer which never acknowledges took before."""
        return [lease for lease in self.out.values() if lease.expires is None and lease.trainer == trainer]
