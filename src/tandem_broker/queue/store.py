"""The broker's queue: environments put groups in, trainers take batches out, nothing accepted is lost.

Pure logic: no file, no clock (``now`` is passed in, seconds), no JSON; one caller at a time. What must survive the
process goes to a journal as it happens. Batches are formed by ``formation``; ``tenants`` knows the environments.
"""

from __future__ import annotations

import secrets
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tandem_broker.protocol.messages import EnvAccepted, EnvRegistration, EnvStatus, RunParameters
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue import records
from tandem_broker.queue.tenants import Item, Tenants
from tandem_broker.queue.waiting import WaitingGroups

MAX_BATCH = 1 << 14
"""Most sequences of a batch."""
PROGRESS = ("started", "step", "policy", "took", "returned", "order", "counts")
"""Attributes of the queue that a restart must know."""


class GroupQueue:
    """Groups, environments, leases and the run."""

    def __init__(self, options: records.StoreOptions | None = None, journal: records.Journal | None = None) -> None:
        self.options = options or records.StoreOptions()
        self.journal = journal or records.Journal()
        self.counts: Counter[str] = Counter()
        """Of groups and leases, as ``status`` tells them."""
        self.order = 0
        """Place of the next group in the order of arrival."""
        self.tenants = Tenants(self.options, self.journal)
        self._begin()

    def _begin(self) -> None:
        """Nothing is queued, out or known but the environments."""
        self.waiting = WaitingGroups(self.tenants, self.journal, self.options)
        self.leases: dict[str, records.BatchLease] = {}
        """Those that are out, by name."""
        self.over: OrderedDict[str, records.BatchLease] = OrderedDict()
        """The last ones that were acknowledged, expired or returned, oldest first."""
        self.seen: OrderedDict[str, float] = OrderedDict()
        """When each key was accepted, oldest first."""
        self.run: RunParameters | None = None
        self.started = False
        self.step = 0
        self.policy: int | None = None
        """Policy step that the trainer last told."""
        self.took = False
        """A batch was served since the trainer told that step."""
        self.returned = 0
        """Batches that came back and will be served again without counting as a step."""

    def register(self, run: RunParameters) -> int:
        """A trainer begins, perhaps anew: queue and environments stay, batches it had out come back.

        Groups already queued that are larger than its batches can never be served: they are dropped and counted.

        Returns:
            A number that is never used again.

        Raises:
            GroupRefused: a batch size below 1 or above ``MAX_BATCH``.
        """
        if not 1 <= run.batch_size <= MAX_BATCH:
            raise records.GroupRefused(f"batch_size is {run.batch_size}; expected 1 to {MAX_BATCH} sequences")
        self._return(list(self.leases.values()))
        self.run, self.started, self.step, self.returned = run, False, run.starting_step, 0
        self.policy, self.took = None, False
        self.tenants.batch_size = run.batch_size
        self._drop([item for item in self.waiting.of("queued", "buffered") if item.size > run.batch_size])
        return uuid.uuid4().int

    def reset(self) -> None:
        """Forget run, queue, batches and step. Environments that speak again keep their ids; ids are not reused."""
        self._drop(list(self.waiting.items.values()))
        self.tenants.batch_size = 0
        self._begin()
        self.journal.cleared()
        for tenant in self.tenants.by_id.values():
            tenant.live = False
            self.tenants.note(tenant)

    @property
    def policy_step(self) -> int:
        """Policy version of a group without one of its own: the policy step last reported, else the step."""
        return self.step if self.policy is None else self.policy

    @property
    def current_step(self) -> int:
        """What environments are told: batches served, or where the trainer tells its steps, the one it works for.

        A trainer that drops groups takes several batches for a step. The last step counts as done only when nothing is
        out: environments leave then, and the trainer may need another batch.
        """
        if self.policy is None or self.run is None:
            return self.step
        if self.took and self.leases and self.policy + 1 == self.run.num_steps:
            return self.policy
        return self.policy + self.took

    def register_env(
        self, env: EnvRegistration, now: float, *, key: str | None = None, owner: str = ""
    ) -> EnvAccepted | None:
        """A new environment, or under a known ``key`` the one it was before. None: wait for the trainer to start.

        ``owner`` is whose key it was registered with.

        Raises:
            Busy: too many environments are known and none can be forgotten.
        """
        self._advance(now)
        if self.run is None or not self.started:
            return None
        tenant = self.tenants.register(env, now, key, owner)
        self.tenants.note(tenant)
        assert tenant.env_id is not None
        return EnvAccepted(
            env_id=tenant.env_id,
            wandb_name=tenant.name,
            checkpoint_dir=self.run.checkpoint_dir,
            starting_step=self.current_step,
            checkpoint_interval=self.run.save_checkpoint_interval,
            num_steps=self.run.num_steps,
        )

    def disconnect(self, env_id: int, now: float) -> bool:
        """It holds no share any more; what it queued is served. False: the id is unknown."""
        tenant = self.tenants.by_id.get(env_id)
        if tenant is None:
            return False
        tenant.heard = now
        if tenant.connected:
            tenant.connected = tenant.live = False
            self.tenants.note(tenant)
        return True

    def status_env(self, env_id: int, now: float) -> EnvStatus:
        """What an environment throttles itself by. Constant time, whatever is queued.

        Raises:
            GroupRefused: the id is unknown.
        """
        tenant = self.tenants.by_id.get(env_id)
        if tenant is None:
            raise records.GroupRefused(f"no environment has env_id {env_id}; register it with /register-env")
        self._advance(now)
        self.tenants.hear(tenant, now)
        return self.tenants.status(tenant, self.current_step)

    def put(self, entry: GroupEntry, now: float, *, key: str | None = None) -> records.Receipt:
        """Accept one group. A ``key`` that was accepted before adds nothing.

        Raises:
            GroupRefused: no batch can ever hold a group of this size.
            Busy: too much is held.
        """
        return self.put_all([(entry, key)], now)[0]

    def put_all(self, entries: Sequence[tuple[GroupEntry, str | None]], now: float) -> list[records.Receipt]:
        """Accept all of these ``(entry, key)`` or none; see ``put``."""
        self._advance(now)
        most, seconds = self.options.max_keys, self.options.key_seconds
        while self.seen and (len(self.seen) > most or now - next(iter(self.seen.values())) > seconds):
            self.journal.noted(f"key:{self.seen.popitem(last=False)[0]}", None)
        fresh = [(entry, key) for entry, key in entries if key is None or key not in self.seen]
        for tenant in {entry.env: self.tenants.of(entry.env) for entry, _ in entries}.values():
            self.tenants.hear(tenant, now)
        for entry, _ in fresh:
            self.waiting.check(entry)
        receipts = []
        for entry, key in entries:
            if key is not None and key in self.seen:
                self.counts["duplicate"] += 1
                buffered = self.tenants.of(entry.env).sequences["buffered"]
                receipts.append(records.Receipt(kind="duplicate", buffered=buffered))
            else:
                receipts.append(self._accept(entry, key, now))
        return receipts

    def take(
        self,
        now: float,
        *,
        lease: float | None = None,
        policy: int | None = None,
        max_lag: int | None = None,
    ) -> records.ServedBatch | None:
        """The next batch, or None.

        Args:
            now: Seconds.
            lease: Seconds within which the trainer will acknowledge. None: it never does, so the caller acknowledges
                once the answer went out; before that, a restart serves the batch again.
            policy: The trainer's policy step; later groups that do not tell theirs are stamped with it.
            max_lag: Groups sampled more than this many policy steps ago are dropped. None drops none.
        """
        if self.run is None:
            return None
        self._advance(now)
        if not self.started or policy not in (None, self.policy):
            if policy not in (None, self.policy):
                self.policy, self.took = policy, False
            self.started = True
        chosen = self.waiting.next_batch()
        if max_lag is not None and self.policy is not None:
            oldest = self.policy - max_lag
            while chosen and (stale := [item for item in chosen if (item.entry.version or 0) < oldest]):
                self._drop(stale)
                chosen = self.waiting.next_batch()
        if not chosen:
            return None
        return self._serve(chosen, lease, now)

    def acknowledge(self, batch_id: str, now: float) -> str:
        """The batch is trained. Of two batches that hold the same group (a lease ran out) the first to say so wins.

        Returns why not all of it was trained by this batch alone; empty if it was. Again it returns the same.
        """
        self._advance(now)
        lease = self.leases.get(batch_id) or self.over.get(batch_id)
        if lease is None:
            return f"no batch is called {batch_id}: never served, or long ago"
        if lease.answer is not None:
            return lease.answer
        trained = [self.waiting.items[order] for order in lease.orders if order in self.waiting.items]
        already = len(lease.orders) - len(trained)
        self.waiting.move(trained, "trained", batch_id)
        self.counts["trained"] += len(trained)
        self.counts["doubled"] += already
        if batch_id in self.over:
            self.returned = max(0, self.returned - 1)
        why = "a lease ran out, or a trainer registered meanwhile"
        lease.answer = f"{already} groups of batch {batch_id} were trained by another batch: {why}" if already else ""
        lease.orders = []
        self._end(lease)
        return lease.answer

    def renew(self, batch_id: str, now: float) -> str:
        """Its lease begins anew; returns why not, where it is not out (any more)."""
        self._advance(now)
        if (lease := self.leases.get(batch_id)) is None:
            return f"no batch {batch_id} is leased"
        if lease.seconds is not None:
            lease.expires = now + lease.seconds
        return ""

    def return_lease(self, batch_id: str, now: float) -> str:
        """The batch was not trained: its groups go back to the front, in order; returns why not, as ``renew``."""
        self._advance(now)
        if (lease := self.leases.get(batch_id)) is None:
            return f"no batch {batch_id} is leased"
        self._return([lease])
        return ""

    def status(self, now: float) -> dict[str, Any]:
        """Everything for people and metrics.

        ``counts`` are of groups since the ledger began (accepted, duplicate, trained, doubled, dropped) and of leases
        that expired; ``waits_for`` says why no batch can be formed; anonymous environments come last.
        """
        self._advance(now)
        everybody = list(self.tenants)
        held: Counter[records.State] = sum((tenant.groups for tenant in everybody), Counter())
        return {
            "step": self.step,
            "policy": self.policy_step,
            "run": self.run,
            "started": self.started,
            **{f"{state}_groups": held[state] for state in ("queued", "buffered", "leased")},
            "queued_sequences": sum(tenant.sequences["queued"] for tenant in everybody),
            "held_bytes": self.waiting.bytes,
            "leases": len(self.leases),
            "counts": dict(self.counts),
            "waits_for": self.waiting.waits_for(),
            "envs": [t.report() for t in everybody if t.env_id is not None or t.accepted or t.groups.total()],
        }

    def _advance(self, now: float) -> None:
        """Leases that ran out come back; environments that fell silent lose their share."""
        self.tenants.sweep(now)
        leases = self.leases.values()
        expired = [lease for lease in leases if lease.expires is not None and lease.expires <= now]
        self.counts["expired"] += len(expired)
        self._return(expired)

    def _accept(self, entry: GroupEntry, key: str | None, now: float) -> records.Receipt:
        tenant = self.tenants.of(entry.env)
        if entry.version is None:
            entry = replace(entry, version=self.policy_step)
        item = Item(self.order, entry, tenant, "queued")
        self.order += 1
        self.waiting.put(item)
        if key is not None:
            self.seen[key] = now
            self.journal.noted(f"key:{key}", now)
        tenant.accepted += 1
        self.counts["accepted"] += 1
        buffered = tenant.env_id is not None and entry.size < tenant.spec.group_size
        return records.Receipt(kind="buffered" if buffered else "received", buffered=tenant.sequences["buffered"])

    def _serve(self, chosen: list[Item], seconds: float | None, now: float) -> records.ServedBatch:
        if self.returned:
            self.returned -= 1
        else:
            self.step += 1
        expires = None if seconds is None else now + seconds
        orders = [item.order for item in chosen]
        lease = records.BatchLease(secrets.token_hex(8), orders, seconds, expires)
        self.leases[lease.id] = lease
        self.took = True
        self.journal.noted(f"lease:{lease.id}", msgspec.to_builtins(lease))
        self.waiting.move(chosen, "leased", lease.id)
        return records.ServedBatch(id=lease.id, entries=tuple(item.entry for item in chosen))

    def _return(self, leases: list[records.BatchLease]) -> None:
        """Batches that were not trained: their groups go back in place, and serving them again is no new step."""
        for lease in leases:
            back = self.groups_out(lease)
            self.waiting.move(back, "queued")
            self.returned += bool(back)
            self._end(lease)

    def restored(self, lease: records.BatchLease, now: float) -> None:
        """Take in a lease that a journal kept; its time begins anew."""
        lease.expires = None if lease.seconds is None else now + lease.seconds
        is_out = bool(self.groups_out(lease))
        (self.leases if is_out else self.over)[lease.id] = lease
        if is_out and lease.seconds is None:
            self._return([lease])

    def groups_out(self, lease: records.BatchLease) -> list[Item]:
        """Groups that are out with this lease, and not trained or served with another meanwhile."""
        items = [self.waiting.items.get(order) for order in lease.orders]
        return [item for item in items if item and item.state == "leased" and item.batch == lease.id]

    def _end(self, lease: records.BatchLease) -> None:
        self.journal.noted(f"lease:{lease.id}", msgspec.to_builtins(lease))
        self.leases.pop(lease.id, None)
        self.over[lease.id] = lease
        self.over.move_to_end(lease.id)
        if len(self.over) > records.REMEMBERED:
            self.journal.noted(f"lease:{self.over.popitem(last=False)[0]}", None)

    def _drop(self, items: list[Item]) -> None:
        self.waiting.move(items, "dropped")
        self.counts["dropped"] += len(items)

    def progress(self) -> dict[str, Any]:
        """What a restart must know beside groups, environments, leases and keys."""
        run = None if self.run is None else msgspec.structs.asdict(self.run)
        counters = {name: getattr(self, name) for name in PROGRESS}
        return {**counters, "run": run, "next_id": self.tenants.next_id}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Inverse of ``progress``."""
        for name in PROGRESS:
            setattr(self, name, progress[name])
        self.counts = Counter(progress["counts"])
        self.tenants.next_id = progress["next_id"]
        if progress["run"] is not None:
            self.run = RunParameters(**progress["run"])
            self.tenants.batch_size = self.run.batch_size
