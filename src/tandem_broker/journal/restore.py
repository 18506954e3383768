"""Fills a new store from what the ledger kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem_broker.protocol.messages import EnvRegistration, RunParameters
from tandem_broker.queue.leases import lease_of
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
    for key, at in keys:
        store.seen.add(key, at)
    envs = {int(name.removeprefix("env:")): fact for name, fact in facts.items() if name.startswith("env:")}
    for env_id in sorted(envs):
        _tenant(store, env_id, envs[env_id], now)
    store.tenants.next_id = max(store.tenants.next_id, progress.get("next_id", 0))
    items = _items(store, rows)
    store.order = max([store.order, *(order + 1 for order in items)])
    counts = store.counts
    counts.update(progress.get("counts", {}))
    counts["accepted"] = counts["trained"] + counts["dropped"] + len(items)
    for name, fact in facts.items():
        if name.startswith("lease:"):
            _lease(store, name.removeprefix("lease:"), fact, items, now)


def _tenant(store: GroupQueue, env_id: int, fact: Mapping[str, Any], now: float) -> None:
    noted = {name: fact[name] for name in ("name", "key", "owner", "connected", "live")}
    store.tenants.add(Tenant(env_id=env_id, spec=EnvRegistration(**fact["spec"]), heard=now, **noted))


def _items(store: GroupQueue, rows: Iterable[tuple[int, GroupEntry, State, str | None]]) -> dict[int, Item]:
    """Every entry in its place, by its order of arrival."""
    items = {}
    for order, entry, state, batch in sorted(rows, key=lambda row: row[0]):
        item = Item(order, entry.size, entry.num_bytes, entry, store.tenants.of(entry.env), state, batch)
        items[order] = item
        store.waiting.hold(item)
        if state == "buffered":
            store.waiting.buffer(item)
        elif state == "queued":
            store.waiting.enqueue([item])
    return items


def _lease(store: GroupQueue, name: str, fact: dict[str, Any], items: Mapping[int, Item], now: float) -> None:
    lease = lease_of(name, fact, items, now)
    if not any(item.batch == name and item.state == "leased" for item in lease.items):
        store.leases.over[name] = lease
        return
    store.leases.out[name] = lease
    if lease.seconds is None and not lease.delivered:
        store.return_lease(name, now)
