"""The groups that wait: buffers and queues of all environments, and the batch they would form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue import formation
from tandem_broker.queue.records import Busy, GroupRefused, Journal, State, StoreOptions
from tandem_broker.queue.tenants import Item, Tenant, Tenants

_SOURCES: tuple[tuple[State, ...], ...] = (("queued",), ("queued", "buffered"))
"""Where a batch's groups come from: the queue, else the buffers as well."""


class WaitingGroups:
    """Groups held. Those out on lease are counted in, but only those in a buffer or queue can be part of a batch."""

    def __init__(self, tenants: Tenants, journal: Journal, options: StoreOptions) -> None:
        self.tenants = tenants
        self.items: dict[int, Item] = {}
        """Every group that is neither trained nor dropped, by its place in the order of arrival, and in this order."""
        self.bytes = 0
        self.latest: Item | None = None
        """The group that entered a queue last."""
        self._journal = journal
        self._options = options

    def of(self, *states: State) -> Iterator[Item]:
        """Those in these states, in the order of arrival."""
        return (item for item in self.items.values() if item.state in states)

    # --- coming in ---

    def check(self, entry: GroupEntry) -> None:
        """Whether a group may come in now.

        While no batch can be formed, an environment that has less than a batch queued is let in whatever the bounds
        say: otherwise a queue full of one environment's groups could keep out what another one's share waits for.

        Raises:
            GroupRefused: no batch can hold it.
            Busy: too much is held.
        """
        limit, batch_size, tenant = self._options, self.tenants.batch_size, self.tenants.of(entry.env)
        if batch_size and entry.size > batch_size:
            raise GroupRefused(f"the group has {entry.size} sequences and a batch {batch_size}: no batch can hold it")
        everybody = len(self.items) >= limit.max_groups or self.bytes >= limit.max_bytes
        if not everybody and tenant.held_bytes < limit.max_env_bytes:
            return
        short = self._has(tenant, "queued", "buffered") < batch_size
        if short and self.next_batch() is None:
            return
        who = "the broker" if everybody else f"environment {tenant.name}"
        groups, held = (len(self.items), self.bytes) if everybody else (tenant.groups.total(), tenant.held_bytes)
        raise Busy(f"{who} holds {groups} groups of {held / 2**20:.0f} MiB that wait for the trainer; try again later")

    def hold(self, item: Item) -> None:
        """Count it until it is trained or dropped."""
        self.items[item.order] = item
        self.bytes += item.num_bytes
        item.tenant.held_bytes += item.num_bytes
        self._entered(item)

    def put(self, item: Item) -> None:
        """Queue it; one smaller than its environment's groups is buffered until others fill it up."""
        size = item.tenant.spec.group_size
        if item.tenant.env_id is not None and item.size < size:
            item.state = "buffered"
        self.hold(item)
        self._journal.added(item.order, item.entry, item.state)
        if item.state == "buffered":
            partial = [other for other in self.of("buffered") if other.tenant is item.tenant]
            self.move(formation.earliest(partial, size) or [], "queued")

    # --- from state to state ---

    def move(self, items: Sequence[Item], state: State, batch: str | None = None) -> None:
        """Into another state, with this batch; trained and dropped ones are let go."""
        for item in items:
            item.tenant.count(item, -1)
            item.state, item.batch = state, batch
            if state in ("trained", "dropped"):
                del self.items[item.order]
                self.bytes -= item.num_bytes
                item.tenant.held_bytes -= item.num_bytes
            else:
                self._entered(item)
        if items:
            self._journal.moved([item.order for item in items], state, batch)

    def _entered(self, item: Item) -> None:
        item.tenant.count(item, 1)
        if item.state == "queued" and (self.latest is None or item.order > self.latest.order):
            self.latest = item

    def next_batch(self) -> list[Item] | None:
        """The groups of the next batch, in order, still where they are; None if none can be formed.

        From the queues; if those cannot, from the buffers too: partial groups that never add up must not be stuck.
        Minimum shares hold. Only if every environment that has one queued enough for it and sizes that add up
        exactly cannot be found are they relaxed: to one group each, then to none.
        """
        total = self.tenants.batch_size
        if not total:
            return None
        minimums = self.tenants.minimums()
        for states in _SOURCES:
            if any(self._has(self.tenants.by_id[env], *states) < need for env, need in minimums.items()):
                continue
            relaxed = [minimums, dict.fromkeys(minimums, 1), {}] if minimums else [minimums]
            for least in relaxed:
                if chosen := self._select(total, least, states):
                    return formation.in_packs(chosen)
        return None

    def _has(self, tenant: Tenant, *states: State) -> int:
        return sum(tenant.sequences[state] for state in states)

    def _select(self, total: int, minimums: dict[int, int], states: Sequence[State]) -> list[Item] | None:
        if not minimums:  # without looking at more than it takes
            return formation.earliest(self.of(*states), total)
        others: list[Item] = []
        lines: dict[int | None, list[Item]] = {env: [] for env in minimums}
        for item in self.of(*states):
            lines.get(item.tenant.env_id, others).append(item)
        return formation.batch(total, [(need, lines[env]) for env, need in minimums.items()], others)

    def waits_for(self) -> str:
        """Why no batch can be formed; empty if one can."""
        total = self.tenants.batch_size
        if not total:
            return "no trainer has registered"
        if self.next_batch() is not None:
            return ""
        for env, need in self.tenants.minimums().items():
            tenant = self.tenants.by_id[env]
            if (has := self._has(tenant, "queued", "buffered")) < need:
                return f"environment {tenant.name} has {has} of the {need} sequences its share asks for"
        sizes = Counter(item.size for item in self.of("queued", "buffered"))
        if (waiting := sum(sizes.elements())) < total:
            return f"{waiting} of the {total} sequences of a batch wait"
        return f"groups of {', '.join(map(str, sorted(sizes)))} sequences cannot add up to a batch of {total}"
