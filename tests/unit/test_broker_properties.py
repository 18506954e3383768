"""Whatever happens in whatever order, the broker keeps its promises: played against a model that only knows names."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.brokers import env_spec, run_parameters
from support.tiers import examples

from tandem_broker.journal import Ledger
from tandem_broker.protocol.messages import EnvStatus, RunParameters
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue import formation
from tandem_broker.queue.records import Busy, GroupRefused, StoreOptions
from tandem_broker.queue.store import GroupQueue
from tandem_broker.queue.tenants import Item

pytestmark = pytest.mark.slow

OPTIONS = StoreOptions(
    max_groups=24, max_bytes=24 * 9, max_env_bytes=16 * 9, max_environments=6,
    heartbeat_seconds=60.0, key_seconds=500.0, max_keys=20,
)  # fmt: skip
RUNS = st.sampled_from([4, 6, 8])
BATCH = st.integers(0, 30)


def run(batch_size: int) -> RunParameters:
    return run_parameters(batch_size=batch_size, max_token_len=64)


def status_by_hand(store: GroupQueue, env_id: int) -> EnvStatus:
    """The table of the protocol, counted anew."""
    batch_size = store.run.batch_size if store.run else 0
    tenants = [*store.tenants.by_id.values(), store.tenants.anonymous]
    queue = list(store.waiting.of("queued"))
    queued = {tenant.env_id: [item.size for item in queue if item.tenant is tenant] for tenant in tenants}
    live = [tenant for tenant in tenants if tenant.live]
    me = store.tenants.by_id[env_id]
    largest = max([1, *(size for sizes in queued.values() for size in sizes)])
    size = max([me.spec.group_size, *queued[env_id]])
    own, others = sum(queued[env_id]), 0
    for tenant in tenants:
        share = (tenant.spec.min_batch_allocation or 0) if tenant.live else 0
        if tenant is not me and largest > 1:
            whole = math.ceil(sum(queued[tenant.env_id]) / largest) * largest
            others += max(0, whole - int(batch_size * share))
    mine = me.spec.max_token_length * me.spec.weight
    total = sum(tenant.spec.max_token_length * tenant.spec.weight for tenant in live)
    return EnvStatus(
        current_step=store.current_step,
        queue_size=(own + others) // size,
        self_queue_size=own // size,
        max_group_size=largest,
        unallocated_fraction=1 - min(1, sum(tenant.spec.min_batch_allocation or 0 for tenant in live)),
        env_weight=max(0.01, mine / total if total else float(mine > 0)),
    )


class Promises(RuleBasedStateMachine):
    """``self.held`` are accepted and neither trained nor dropped; ``self.served`` is what each batch held."""

    @initialize(batch_size=RUNS)
    def begin(self, batch_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1000.0
        self.ledger = Ledger.open(self.folder, OPTIONS, self.now)
        self.store = self.ledger.store
        self.held: dict[str, int] = {}
        self.trained: set[str] = set()
        self.served: dict[str, list[str]] = {}
        self.over: dict[str, str] = {}
        self.keys: dict[str, float] = {}
        self.count = 0
        self.step = 0
        self.store.register(run(batch_size))
        self.store.take(self.now)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.folder)

    @property
    def waiting(self) -> list[Item]:
        return list(self.store.waiting.of("queued", "buffered"))

    def expect_trained(self, batch: str) -> tuple[int, int]:
        fresh = [name for name in self.served[batch] if name in self.held]
        for name in fresh:
            del self.held[name]
            assert name not in self.trained
            self.trained.add(name)
        return len(fresh), len(self.served[batch]) - len(fresh)

    # --- what may happen ---

    @precondition(lambda self: len(self.served) > 1)
    @rule(batch_size=RUNS)
    def trainer_registers_again(self, batch_size: int) -> None:
        self.store.register(run(batch_size))
        self.held = {name: size for name, size in self.held.items() if size <= batch_size}
        assert not self.store.leases
        self.step = 0

    @rule(
        group_size=st.integers(1, 4),
        share=st.sampled_from([None] * 6 + [0.25, 0.5, 0.75]),
        weight=st.sampled_from([0.0, 1.0, 3.0]),
        key=st.sampled_from([None, "k1", "k2"]),
    )
    def environment_registers(self, group_size: int, share: float | None, weight: float, key: str | None) -> None:
        spec = env_spec(name="e", max_token_length=8, weight=weight, group_size=group_size, min_batch_allocation=share)
        known = next((tenant for tenant in self.store.tenants.by_id.values() if key and tenant.key == key), None)
        try:
            ticket = self.store.register_env(spec, self.now, key=key)
        except Busy:
            assert len(self.store.tenants.by_id) == OPTIONS.max_environments
            return
        assert (ticket is None) == (not self.store.started)
        if ticket is not None and known is not None:
            assert ticket.env_id == known.env_id

    @rule(env=st.integers(0, 8))
    def environment_leaves(self, env: int) -> None:
        assert self.store.disconnect(env, self.now) == (env in self.store.tenants.by_id)

    @rule(env=st.integers(0, 8))
    def environment_polls(self, env: int) -> None:
        if env in self.store.tenants.by_id:
            assert self.store.status_env(env, self.now) == status_by_hand(self.store, env)

    @rule(env=st.sampled_from([None, 0, 0, 1, 1, 2, 3]), size=st.integers(1, 9), key=st.sampled_from([None, "a", "b"]))
    def submit(self, env: int | None, size: int, key: str | None) -> None:
        self.submit_one(env, size, key)

    def submit_one(self, env: int | None, size: int, key: str | None) -> None:
        self.count += 1
        name = f"g{self.count}"
        entry = GroupEntry(id=name, env=env, size=size, payload=name.encode().ljust(9))
        batch_size = self.store.run.batch_size if self.store.run else 9
        try:
            receipt = self.store.put(entry, self.now, key=key)
        except GroupRefused:
            assert size > batch_size
            return
        except Busy:
            tenant = self.store.tenants.of(env)
            waits = tenant.sequences["queued"] + tenant.sequences["buffered"]
            assert self.store.waiting.next_batch() is not None or waits >= batch_size
            held = 9 * tenant.groups.total()
            assert len(self.store.waiting.items) >= OPTIONS.max_groups or held >= OPTIONS.max_env_bytes
            return
        known = key is not None and self.now - self.keys.get(key, -1e9) <= OPTIONS.key_seconds
        assert (receipt.kind == "duplicate") == known
        if not known:
            self.held[name] = size
            if key is not None:
                self.keys[key] = self.now

    @rule(env=st.sampled_from([None, 0, 1, 2, 3]), size=st.integers(1, 4))
    def submit_several(self, env: int | None, size: int) -> None:
        for _ in range(3):
            self.submit_one(env, size, None)

    @rule(lease=st.booleans())
    def trainer_polls(self, lease: bool) -> None:
        self.store.status(self.now)  # leases that ran out come back first
        before = {item.entry.id: (item, item.state) for item in self.waiting}
        returned = self.store.returned
        batch = self.store.take(self.now, lease=50.0 if lease else None)
        self.ledger.commit()
        assert self.store.run is not None
        total, needs = self.store.run.batch_size, self.store.tenants.minimums()
        if batch is None:
            self.check_nothing_is_stuck(total, needs)
            return
        names = [entry.id for entry in batch.entries]
        assert len(set(names)) == len(names)
        assert set(names) <= set(before)
        assert set(names) <= set(self.held)
        assert sum(entry.size for entry in batch.entries) == total
        assert [entry.payload for entry in batch.entries] == [name.encode().ljust(9) for name in names]
        self.step += not returned
        assert self.store.step == self.step
        self.served[batch.id] = names
        self.check_order(before, set(names))
        self.check_shares(before, set(names), total, needs)

    def check_nothing_is_stuck(self, total: int, needs: dict[int, int]) -> None:
        sums = {0}
        for item in self.waiting:
            sums |= {have + item.size for have in sums}
        if total in sums:
            has = Counter({item.tenant.env_id: 0 for item in self.waiting})
            for item in self.waiting:
                has[item.tenant.env_id] += item.size
            assert any(has[env] < need for env, need in needs.items())
        else:
            assert self.store.status(self.now)["waits_for"]

    def check_order(self, before: dict[str, tuple[Item, str]], taken: set[str]) -> None:
        """Of one environment's groups of one size the older go first; buffers are a last resort."""
        for item, state in before.values():
            if item.entry.id not in taken and state == "queued":
                for name in taken:
                    other = before[name][0]
                    same = other.tenant is item.tenant and other.size == item.size and before[name][1] == "queued"
                    assert not (same and item.order < other.order)

    def check_shares(
        self, before: dict[str, tuple[Item, str]], taken: set[str], total: int, needs: dict[int, int]
    ) -> None:
        got: Counter[int | None] = Counter()
        for name in taken:
            got[before[name][0].tenant.env_id] += before[name][0].size
        if any(got[env] < need for env, need in needs.items()):  # only if the sizes that wait allow nothing else
            queued: Counter[int | None] = Counter()
            for item, state in before.values():
                queued[item.tenant.env_id] += item.size if state == "queued" else 0
            short = any(queued[env] < need for env, need in needs.items())
            from_buffers = short or any(before[name][1] == "buffered" for name in taken)
            usable = sorted(
                (item for item, state in before.values() if from_buffers or state == "queued"), key=formation.BY_ORDER
            )
            lines = [(need, [i for i in usable if i.tenant.env_id == env]) for env, need in needs.items()]
            rest = [item for item in usable if item.tenant.env_id not in needs]
            assert formation.batch(total, lines, rest) is None
            assert all(sum(item.size for item in line) >= need for need, line in lines)

    @precondition(lambda self: self.served)
    @rule(which=BATCH)
    def trainer_acknowledges(self, which: int) -> None:
        batch = list(self.served)[which % len(self.served)]
        before = Counter(self.store.counts)
        answer = self.store.acknowledge(batch, self.now)
        counted = tuple(self.store.counts[name] - before[name] for name in ("trained", "doubled"))
        if batch in self.over:
            assert (answer, counted) == (self.over[batch], (0, 0))
        else:
            assert not answer.startswith("no batch"), "a batch was forgotten"
            assert counted == (expected := self.expect_trained(batch))
            assert bool(answer) == bool(expected[1])
            self.over[batch] = answer

    @precondition(lambda self: self.served)
    @rule(which=BATCH)
    def trainer_gives_back(self, which: int) -> None:
        batch = list(self.served)[which % len(self.served)]
        out = batch in self.store.leases and self.store.leases[batch].expires is None
        assert not self.store.return_lease(batch, self.now) or not out
        assert batch not in self.store.leases

    @precondition(lambda self: self.served)
    @rule(which=BATCH)
    def trainer_renews(self, which: int) -> None:
        batch = list(self.served)[which % len(self.served)]
        if not self.store.renew(batch, self.now) and (expires := self.store.leases[batch].expires) is not None:
            assert expires == self.now + 50.0

    @rule(batches=st.integers(1, 3))
    def trainer_trains(self, batches: int) -> None:
        for _ in range(batches):
            self.trainer_polls(True)
            if self.served:
                self.trainer_acknowledges(len(self.served) - 1)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def broker_restarts(self) -> None:
        before = self.store.status(self.now)
        unsent = sum(lease.seconds is None for lease in self.store.leases.values())
        places = {(item.order, item.state) for item in self.waiting}
        self.ledger.close()
        self.ledger = Ledger.open(self.folder, OPTIONS, self.now)
        self.store = self.ledger.store
        after = self.store.status(self.now)
        assert (after["step"], after["run"], after["started"]) == (before["step"], before["run"], before["started"])
        assert after["leases"] == before["leases"] - unsent
        assert after["counts"].get("trained", 0) == before["counts"].get("trained", 0)
        assert after["counts"].get("accepted", 0) == before["counts"].get("accepted", 0)
        assert places <= {(item.order, item.state) for item in self.waiting}
        assert [env["env_id"] for env in after["envs"] if env["env_id"] is not None] == [
            env["env_id"] for env in before["envs"] if env["env_id"] is not None
        ]

    @precondition(lambda self: len(self.served) > 3)
    @rule()
    def everything_is_reset(self) -> None:
        self.store.reset()
        self.held, self.served, self.over, self.keys, self.step = {}, {}, {}, {}, 0
        self.store.register(run(8))

    # --- what must always hold ---

    @invariant()
    def every_accepted_group_is_in_one_place(self) -> None:
        if not hasattr(self, "store"):
            return
        for earlier in [one for one in self.store.leases.values() if one.expires is None]:
            items = [self.store.waiting.items.get(order) for order in earlier.orders]
            assert all(item is None or item.state == "leased" for item in items)
        out = [item for lease in self.store.leases.values() for item in self.store.groups_out(lease)]
        names = [item.entry.id for item in [*self.waiting, *out]]
        assert sorted(names) == sorted(self.held)

    @invariant()
    def counters_equal_a_recount(self) -> None:
        if not hasattr(self, "store"):
            return
        items = list(self.store.waiting.items.values())
        assert items == sorted(items, key=formation.BY_ORDER)
        assert self.store.status(0.0)["queued_groups"] == sum(item.state == "queued" for item in items)
        assert len(self.store.waiting.items) == len(self.held)
        assert self.store.waiting.bytes == 9 * len(self.held)
        for tenant in self.store.tenants:
            own = [item for item in items if item.tenant is tenant]
            assert +tenant.groups == Counter(item.state for item in own)
            assert tenant.sequences.total() == sum(item.size for item in own)
            assert tenant.held_bytes == sum(item.num_bytes for item in own)
            assert +tenant.sizes == Counter(item.size for item in own if item.state == "queued")
        counts = self.store.counts
        assert counts["accepted"] == counts["trained"] + counts["dropped"] + len(self.held)

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "store"):
            return
        self.ledger.commit()
        tenants = len(self.store.tenants.by_id) + 1
        assert len(self.store.waiting.items) <= OPTIONS.max_groups + tenants * 8
        assert len(self.store.seen) <= OPTIONS.max_keys + 1


TestPromises = Promises.TestCase
TestPromises.settings = settings(
    max_examples=examples(50),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
