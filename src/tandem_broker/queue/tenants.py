"""Registered environments of a store, their queues, and what others may see of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import msgspec

from tandem_broker.protocol.messages import EnvRegistration, EnvStatus
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue.records import Busy, Journal, State, StoreOptions

WEIGHT_FLOOR = 0.01
ANONYMOUS = EnvRegistration(desired_name="anonymous", max_token_length=0, weight=0.0, group_size=1)


class Item(msgspec.Struct, eq=False):
    """One accepted group and where it is."""

    order: int
    """Place in the order of arrival; kept when a lease runs out."""
    entry: GroupEntry
    tenant: Tenant
    state: State
    batch: str | None = None
    """The lease or, once trained, the batch that trained it."""

    @property
    def size(self) -> int:
        """Sequences."""
        return self.entry.size

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return len(self.entry.payload)


class Tenant(msgspec.Struct, eq=False, kw_only=True):
    """One environment; ``env_id`` None stands for everybody anonymous."""

    env_id: int | None
    spec: EnvRegistration
    name: str
    """With its count."""
    heard: float
    key: str | None = None
    """The identity it gave to be known again."""
    owner: str = ""
    """Whose key it was registered with; empty: nobody's."""
    connected: bool = True
    """It registered and did not disconnect."""
    live: bool = True
    """Connected and heard from lately: it counts for weights and shares."""
    groups: Counter[State] = msgspec.field(default_factory=Counter)
    """Those held, by their state."""
    sequences: Counter[State] = msgspec.field(default_factory=Counter)
    """Those of these groups."""
    sizes: Counter[int] = msgspec.field(default_factory=Counter)
    """Queued groups by size."""
    held_bytes: int = 0
    accepted: int = 0
    """Groups accepted by this process."""

    def count(self, item: Item, sign: int) -> None:
        """A group of it entered (1) or left (-1) its state."""
        self.groups[item.state] += sign
        self.sequences[item.state] += sign * item.size
        if item.state == "queued":
            self.sizes[item.size] += sign

    @property
    def largest(self) -> int:
        """Sequences of its largest queued group; 1 if it has none."""
        return max((size for size, count in self.sizes.items() if count), default=1)

    @property
    def share(self) -> float:
        """The minimum share it holds now."""
        return (self.spec.min_batch_allocation or 0.0) if self.live else 0.0

    @property
    def pull(self) -> float:
        """Context times weight: what its generation weighs against others'."""
        return self.spec.max_token_length * max(0.0, self.spec.weight)

    def report(self) -> dict[str, Any]:
        """For people and metrics: ``connected`` is neither disconnected nor silent."""
        return {
            "env_id": self.env_id,
            "connected": self.live,
            "left": self.env_id is not None and not self.connected,
            "queued_groups": self.groups["queued"],
            "queued_sequences": self.sequences["queued"],
            "buffered_sequences": self.sequences["buffered"],
            **{name: getattr(self, name) for name in ("name", "heard", "held_bytes", "accepted")},
            **{name: getattr(self.spec, name) for name in ("weight", "group_size", "min_batch_allocation")},
        }


class Tenants:
    """All environments."""

    def __init__(self, options: StoreOptions, journal: Journal) -> None:
        self.batch_size = 0
        """Sequences of a batch; 0 without a run."""
        self.options = options
        self.journal = journal
        self.by_id: dict[int, Tenant] = {}
        self.anonymous = Tenant(env_id=None, spec=ANONYMOUS, name="anonymous", heard=0.0, connected=False, live=False)
        self.next_id = 0

    def __iter__(self) -> Iterator[Tenant]:
        yield from self.by_id.values()
        yield self.anonymous

    def of(self, env_id: int | None) -> Tenant:
        """The environment of that id, or the anonymous one."""
        return self.anonymous if env_id is None else self.by_id.get(env_id, self.anonymous)

    def register(self, spec: EnvRegistration, now: float, key: str | None, owner: str = "") -> Tenant:
        """A new environment, or the one that gave this key before.

        Raises:
            Busy: the most are known, and none of them is gone.
        """
        tenant = next((known for known in self.by_id.values() if key is not None and known.key == key), None)
        if tenant is None:
            self._make_room()
            names = {tenant.name for tenant in self.by_id.values()}
            name = next(name for n in count() if (name := f"{spec.desired_name}_{n}") not in names)
            tenant = Tenant(env_id=self.next_id, spec=spec, name=name, heard=now, key=key, owner=owner)
            self.add(tenant)
        else:
            tenant.spec, tenant.connected, tenant.live = spec, True, False
            self.hear(tenant, now)
        return tenant

    def note(self, tenant: Tenant) -> None:
        """Tell the journal what a restart must know of it."""
        facts = {name: getattr(tenant, name) for name in ("name", "key", "connected", "live", "owner")}
        self.journal.noted(f"env:{tenant.env_id}", {**facts, "spec": msgspec.to_builtins(tenant.spec)})

    def add(self, tenant: Tenant) -> None:
        """One with an id of its own."""
        assert tenant.env_id is not None
        self.by_id[tenant.env_id] = tenant
        self.next_id = max(self.next_id, tenant.env_id + 1)

    def _make_room(self) -> None:
        """One more must fit: of those that are gone and hold nothing, the one silent for longest is forgotten."""
        if len(self.by_id) < self.options.max_environments:
            return
        gone = [tenant for tenant in self.by_id.values() if not tenant.live and not tenant.groups.total()]
        if not gone:
            raise Busy(f"{len(self.by_id)} environments are registered, the most this broker takes")
        oldest = min(gone, key=lambda tenant: tenant.heard)
        assert oldest.env_id is not None
        del self.by_id[oldest.env_id]
        self.journal.noted(f"env:{oldest.env_id}", None)

    def hear(self, tenant: Tenant, now: float) -> None:
        """It spoke: it takes part (again), unless it said goodbye."""
        tenant.heard = now
        if tenant.connected and not tenant.live:
            tenant.live = True
            self.note(tenant)

    def sweep(self, now: float) -> None:
        """Those not heard from for too long hold no share any more."""
        for tenant in self.by_id.values():
            if tenant.live and now - tenant.heard > self.options.heartbeat_seconds:
                tenant.live = False
                self.note(tenant)

    def _visible(self, tenant: Tenant, largest: int) -> int:
        """Sequences that others see of it: whole packs of the largest size, less what it is guaranteed."""
        whole = -(-tenant.sequences["queued"] // largest) * largest
        return max(0, whole - int(self.batch_size * tenant.share)) if largest > 1 else 0

    def minimums(self) -> dict[int, int]:
        """Least sequences per batch of every live environment that has a share, in order of their ids."""
        shares = {tenant.env_id: tenant.share for tenant in self.by_id.values() if tenant.env_id is not None}
        return minimums(self.batch_size, shares)

    def status(self, tenant: Tenant, step: int) -> EnvStatus:
        """What an environment polls."""
        live = [tenant for tenant in self.by_id.values() if tenant.live]
        largest = max(tenant.largest for tenant in self)
        visible = sum(self._visible(tenant, largest) for tenant in self)
        size, sequences = max(tenant.spec.group_size, tenant.largest), tenant.sequences["queued"]
        total = sum(t.pull for t in live) or tenant.pull
        return EnvStatus(
            current_step=step,
            queue_size=(sequences + visible - self._visible(tenant, largest)) // size,
            self_queue_size=sequences // size,
            max_group_size=largest,
            unallocated_fraction=1.0 - min(1.0, sum(t.share for t in live)),
            env_weight=max(WEIGHT_FLOOR, tenant.pull / total if total else 0.0),
        )


def minimums(batch_size: int, shares: Mapping[int, float]) -> dict[int, int]:
    """Least sequences of each environment in a batch, without those that need none.

    Together more than a batch: all are scaled down alike, but to one sequence (so one group) at least.
    """
    least_sequences = {env: need for env, share in shares.items() if (need := int(batch_size * share)) > 0}
    total = sum(least_sequences.values())
    if total > batch_size:
        least_sequences = {env: max(1, need * batch_size // total) for env, need in least_sequences.items()}
    return least_sequences
