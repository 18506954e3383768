"""Fills a new store from what the ledger kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tandem_broker.protocol.messages import EnvRegistration, RunParameters
from tandem_broker.queue.leases import BatchLease
from tandem_broker.queue.records import GroupEntry, State
from tandem_broker.queue.store import PROGRESS, GroupQueue
from tandem_broker.queue.tenants import Item, Tenant


def restore(
    store: GroupQueue,
    facts: Mapping[str, Any],
    rows: Iterable[tuple[int, GroupEntry, State, str | None]],
    keys: Iterable[tuple[str, float]],
    now: float,
) -> None:
    """Fill a new store. Leases count from ``now``, and so do silences of environments that were not silent already.

    A batch that a trainer which never acknowledges had, and whose answer is not known to have gone out, comes back.

    Args:
        store: as constructed.
        facts: what was noted, by name.
        rows: ``(place, entry, state, batch)`` of every entry that is not trained or dropped, in any order.
        keys: idempotency keys and when they came, oldest first.
        now: seconds.
    """
    progress = facts.get("progress", {})
    if facts.get("run"):
        store.run = RunParameters(**facts["run"])
        store.tenants.batch_size = store.run.batch_size
    for name in PROGRESS:
        setattr(store, name, progress.get(name, getattr(store, name)))
    store.tenants.names.update(facts.get("names", {}))
    store.seen.update(keys)
    envs = {int(name.removeprefix("env:")): fact for name, fact in facts.items() if name.startswith("env:")}
    for env_id, fact in sorted(envs.items()):
        noted = {name: fact[name] for name in ("name", "key", "owner", "connected", "live")}
        store.tenants.add(Tenant(env_id=env_id, spec=EnvRegistration(**fact["spec"]), heard=now, **noted))
    store.tenants.next_id = max(store.tenants.next_id, progress.get("next_id", 0))
    for order, entry, state, batch in sorted(rows, key=lambda row: row[0]):
        item = Item(order, entry.size, entry.num_bytes, entry, store.tenants.of(entry.env), state, batch)
        store.waiting.hold(item)
        if state == "buffered":
            store.waiting.buffer(item)
        elif state == "queued":
            store.waiting.enqueue([item])
        store.order = max(store.order, order + 1)
    counts = store.counts
    counts.update(progress.get("counts", {}))
    counts["accepted"] = counts["trained"] + counts["dropped"] + len(store.waiting.items)
    for name, fact in facts.items():
        if name.startswith("lease:"):
            _lease(store, msgspec.convert(fact, BatchLease), now)


def _lease(store: GroupQueue, lease: BatchLease, now: float) -> None:
    """Its time begins anew."""
    lease.expires = None if lease.seconds is None else now + lease.seconds
    if not store.groups_out(lease):
        store.leases.over[lease.id] = lease
        return
    store.leases.out[lease.id] = lease
    if lease.seconds is None and not lease.delivered:
        store.return_lease(lease.id, now)
