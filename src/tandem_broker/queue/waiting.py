"""The groups that wait: buffers and queues of all environments, and the batch they would form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tandem_broker.protocol.messages import MOST_STEP
from tandem_broker.queue import formation
from tandem_broker.queue.records import Busy, GroupEntry, GroupRefused, Journal, State, StoreOptions
from tandem_broker.queue.tenants import Item, SizeQueues, Tenant, Tenants


class WaitingGroups:
    """Groups held. Those out on lease are counted in, but only those in a buffer or queue can be part of a batch."""

    def __init__(self, tenants: Tenants, journal: Journal, options: StoreOptions) -> None:
        self.tenants = tenants
        self.items: dict[int, Item] = {}
        """Every group that is neither trained nor dropped, by its place in the order of arrival."""
        self.bytes = 0
        self.latest: Item | None = None
        """The group that entered a queue last."""
        self._journal = journal
        self._options = options
        self._formed: tuple[int, list[Item] | None] = (-1, None)

    def __iter__(self) -> Iterator[Item]:
        for tenant in self.tenants:
            yield from tenant.buffer
            yield from tenant.queue

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
        if not 0 <= (entry.version or 0) < MOST_STEP:
            raise GroupRefused(f"the group's step is {entry.version}; expected 0 to below 2**53")
        if batch_size and entry.size > batch_size:
            raise GroupRefused(f"the group has {entry.size} sequences and a batch {batch_size}: no batch can hold it")
        everybody = len(self.items) >= limit.max_groups or self.bytes >= limit.max_bytes
        if not everybody and tenant.held_groups < limit.max_env_groups and tenant.held_bytes < limit.max_env_bytes:
            return
        short = tenant.queue.sequences + tenant.buffer.sequences < batch_size
        if batch_size and self.next_batch() is None and (short or self._completes(entry.size)):
            return
        who = "the broker" if everybody else f"environment {tenant.name}"
        groups, held = (len(self.items), self.bytes) if everybody else (tenant.held_groups, tenant.held_bytes)
        raise Busy(f"{who} holds {groups} groups of {held / 2**20:.0f} MiB that wait for the trainer; try again later")

    def _completes(self, size: int) -> bool:
        """Whether sizes that cannot add up to a batch can with one group of this size more."""
        total = self.tenants.batch_size
        before = formation.reachable(Counter(item.size for item in self), total)
        return not before >> total & 1 and bool(before >> (total - size) & 1)

    def hold(self, item: Item) -> None:
        """It is counted until it is finished."""
        self.items[item.order] = item
        self.bytes += item.num_bytes
        item.tenant.held_groups += 1
        item.tenant.held_bytes += item.num_bytes

    def restored(self, item: Item) -> None:
        """Hold one that a journal kept, where it was."""
        self.hold(item)
        if item.state == "buffered":
            self.buffer(item)
        elif item.state == "queued":
            self.enqueue([item])

    def put(self, item: Item) -> list[Item]:
        """Into the queue, or into the buffer if it is smaller than its environment's groups.

        Returns:
            The buffered ones that it completed and that went into the queue with it.
        """
        size = item.tenant.spec.group_size
        if item.tenant.env_id is None or item.size >= size:
            self.enqueue([item])
            return []
        self.buffer(item)
        completed = formation.earliest(formation.candidates([item.tenant.buffer.lines], size), size) or []
        for partial in completed:
            item.tenant.buffer.remove(partial)
        self.enqueue(completed)
        return completed

    def buffer(self, item: Item) -> None:
        """Into its environment's buffer."""
        item.state = "buffered"
        item.tenant.buffer.insert(item)
        self.tenants.change += 1

    def enqueue(self, items: Iterable[Item]) -> None:
        """Into their environments' queues, each in its place of the order of arrival."""
        for item in items:
            item.state, item.batch = "queued", None
            item.tenant.queue.insert(item)
            if self.latest is None or item.order > self.latest.order:
                self.latest = item
        self.tenants.change += 1

    # --- going out ---

    def lift(self, item: Item) -> None:
        """Out of its buffer or queue, if it is in one."""
        if item.state == "buffered":
            item.tenant.buffer.remove(item)
        elif item.state == "queued":
            item.tenant.queue.remove(item)
        self.tenants.change += 1

    def finish(self, items: Sequence[Item], state: State, batch: str | None) -> None:
        """Trained by this batch, or dropped: they are let go."""
        for item in items:
            self.lift(item)
            del self.items[item.order]
            self.bytes -= item.num_bytes
            item.tenant.held_groups -= 1
            item.tenant.held_bytes -= item.num_bytes
        if items:
            self._journal.moved([item.order for item in items], state, batch)

    def next_batch(self) -> list[Item] | None:
        """The groups of the next batch, in order, still where they are; None if none can be formed."""
        if self._formed[0] != self.tenants.change:
            self._formed = (self.tenants.change, self._form())
        return self._formed[1]

    def _form(self) -> list[Item] | None:
        """From the queues; if those cannot, from the buffers too: partial groups that never add up must not be stuck.

        Minimum shares hold. Only if every environment that has one queued enough for it and sizes that add up
        exactly cannot be found are they relaxed: to one group each, then to none.
        """
        total = self.tenants.batch_size
        if not total:
            return None
        minimums = self.tenants.minimums()
        for with_buffers in (False, True):
            if with_buffers and not any(tenant.buffer.groups for tenant in self.tenants):
                break
            if any(self._has(env, with_buffers) < need for env, need in minimums.items()):
                continue
            relaxed = [minimums, dict.fromkeys(minimums, 1), {}] if minimums else [minimums]
            for least in relaxed:
                if chosen := self._select(total, least, with_buffers):
                    return formation.in_packs(chosen)
        return None

    def _has(self, env: int, with_buffers: bool) -> int:
        tenant = self.tenants.by_id[env]
        return tenant.queue.sequences + (tenant.buffer.sequences if with_buffers else 0)

    def _select(self, total: int, minimums: dict[int, int], with_buffers: bool) -> list[Item] | None:
        def lines(tenant: Tenant) -> list[SizeQueues]:
            return [tenant.queue, tenant.buffer] if with_buffers else [tenant.queue]

        reserved = [
            (need, formation.candidates([queue.lines for queue in lines(self.tenants.by_id[env])], total))
            for env, need in minimums.items()
        ]
        others = [queue.lines for tenant in self.tenants if tenant.env_id not in minimums for queue in lines(tenant)]
        return formation.batch(total, reserved, formation.candidates(others, total))

    def waits_for(self) -> str:
        """Why no batch can be formed; empty if one can."""
        total = self.tenants.batch_size
        if not total:
            return "no trainer has registered"
        if self.next_batch() is not None:
            return ""
        for env, need in self.tenants.minimums().items():
            if (has := self._has(env, True)) < need:
                name = self.tenants.by_id[env].name
                return f"environment {name} has {has} of the {need} sequences its share asks for"
        waiting = sum(self._has(env, True) for env in self.tenants.by_id) + self.tenants.anonymous.queue.sequences
        if waiting < total:
            return f"{waiting} of the {total} sequences of a batch wait"
        sizes = sorted({item.size for item in self})
        return f"groups of {', '.join(map(str, sizes))} sequences cannot add up to a batch of {total}"
