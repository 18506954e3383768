"""The state of a store in one record: for people, and for its journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.broker.records import Report

if TYPE_CHECKING:
    from tandem.broker.store import Store


def report(store: Store) -> Report:
    """Everything for people and metrics. Takes time in the number of environments."""
    everybody = list(store.tenants)
    return Report(
        step=store.step,
        policy=store.policy_step,
        run=store.run,
        started=store.started,
        queued_groups=store.queued_groups,
        queued_sequences=sum(tenant.queue.sequences for tenant in everybody),
        buffered_groups=sum(tenant.buffer.groups for tenant in everybody),
        leased_groups=sum(len(lease.items) for lease in store.leases.out.values()),
        held_bytes=store.waiting.bytes,
        leases=len(store.leases.out),
        counts=dict(store.counts),
        waits_for=store.waiting.waits_for(),
        envs=[t.report() for t in everybody if t.env_id is not None or t.accepted or t.held_groups],
    )


def progress(store: Store) -> dict[str, Any]:
    """The counters that a journal keeps."""
    return {
        "started": store.started,
        "step": store.step,
        "policy": store.policy,
        "took": store.took,
        "returned": store.returned,
        "next_id": store.tenants.next_id,
        "order": store.order,
        "counts": dict(store.counts),
    }
