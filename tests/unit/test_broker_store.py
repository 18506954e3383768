"""The store: what the original records, and each of its faults absent."""

from __future__ import annotations

import pytest
from support.brokers import env_spec, run_parameters, some

from tandem_broker.protocol.messages import EnvAccepted, EnvStatus, RunParameters
from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue.records import Busy, GroupRefused, ServedBatch, StoreOptions
from tandem_broker.queue.store import GroupQueue


def run(batch_size: int, starting_step: int = 0) -> RunParameters:
    return run_parameters(batch_size=batch_size, max_token_len=512, checkpoint_dir="/c", starting_step=starting_step)


def started(batch_size: int, options: StoreOptions | None = None) -> GroupQueue:
    """A trainer registered and polled once."""
    store = GroupQueue(options)
    store.register(run(batch_size))
    assert store.take(0.0) is None
    return store


def joined(
    store: GroupQueue, name: str = "e", group_size: int = 4, weight: float = 1.0, context: int = 256,
    share: float | None = None, key: str | None = None, now: float = 0.0,
) -> int:  # fmt: skip
    spec = env_spec(
        name=name, max_token_length=context, weight=weight, group_size=group_size, min_batch_allocation=share
    )
    ticket = some(store.register_env(spec, now, key=key))
    return ticket.env_id


class Names:
    """Puts groups called 0, 1, 2, ... in."""

    def __init__(self, store: GroupQueue) -> None:
        self.store = store
        self.count = 0

    def put(self, *sizes: int, env: int | None = None, now: float = 0.0, version: int | None = None) -> list[int]:
        """Gives what is left buffered after each."""
        left = []
        for size in sizes:
            entry = GroupEntry(id=str(self.count), env=env, size=size, version=version, payload=b"x" * 10)
            left.append(self.store.put(entry, now).buffered)
            self.count += 1
        return left


def names(batch: ServedBatch | None) -> list[str] | None:
    return None if batch is None else [entry.id for entry in batch.entries]


# --- as recorded ---


def test_status_of_the_recorded_example() -> None:
    """A (groups of 4) has 3 queued, B (groups of 2) has 5: A sees 6 and 3, B sees 11 and 5, the largest is 4."""
    store = started(1000)
    a, b = joined(store, group_size=4), joined(store, group_size=2)
    Names(store).put(4, 4, 4, env=a)
    Names(store).put(2, 2, 2, 2, 2, env=b)
    seen = EnvStatus(
        current_step=0, queue_size=6, self_queue_size=3, max_group_size=4, unallocated_fraction=1.0, env_weight=0.5
    )
    assert store.status_env(a, 0.0) == seen
    status = store.status_env(b, 0.0)
    assert (status.queue_size, status.self_queue_size, status.max_group_size) == (11, 5, 4)


def test_shares_and_weights_in_a_status() -> None:
    store = started(8)
    assert store.register_env(env_spec(name="e", max_token_length=256, group_size=4), 0.0) == EnvAccepted(
        env_id=0, wandb_name="e_0", checkpoint_dir="/c", starting_step=0, checkpoint_interval=10, num_steps=100
    )
    joined(store, share=0.5)
    joined(store, name="other", weight=2.0)
    status = store.status_env(0, 0.0)
    assert (status.unallocated_fraction, status.env_weight, status.max_group_size) == (0.5, 0.25, 1)
    Names(store).put(4, 4, env=1)  # of its 8 sequences, 4 are its own by right
    Names(store).put(4, env=None)
    assert store.status_env(0, 0.0).queue_size == (8 - 4 + 4) // 4


def test_groups_are_buffered_until_they_add_up() -> None:
    """Sizes 3, 3, 2, 2 of an environment with groups of 4: 3, 6, 8 and 6 sequences wait; the two 2s go on."""
    store = started(100)
    env = joined(store, group_size=4)
    assert Names(store).put(3, 3, 2, 2, env=env) == [3, 6, 8, 6]
    assert store.status(0.0)["queued_groups"] == 2
    assert store.waiting.latest is not None
    assert store.waiting.latest.entry.id == "3"


def test_environments_wait_until_the_trainer_polls() -> None:
    store = GroupQueue()
    spec = env_spec(name="e", max_token_length=8)
    assert store.register_env(spec, 0.0) is None
    store.register(run(8))
    assert store.register_env(spec, 0.0) is None
    store.take(0.0)
    assert store.register_env(spec, 0.0) is not None


# --- faults of the original ---


def test_impossible_sizes_are_refused_at_once() -> None:
    store = started(8)
    with pytest.raises(GroupRefused, match="9 sequences and a batch 8"):
        Names(store).put(9)


def test_partial_groups_that_never_add_up_to_a_group_still_make_a_batch() -> None:
    store = started(9)
    env = joined(store, group_size=4)
    Names(store).put(3, 3, 3, env=env)
    assert store.status(0.0)["buffered_groups"] == 3
    assert names(store.take(0.0)) == ["0", "1", "2"]


def test_sizes_that_cannot_add_up_are_told() -> None:
    store = started(8)
    Names(store).put(3, 3, 3)
    assert store.take(0.0) is None
    assert store.status(0.0)["waits_for"] == "groups of 3 sequences cannot add up to a batch of 8"


def test_a_silent_environment_loses_its_share_until_it_speaks() -> None:
    store = started(8, StoreOptions(heartbeat_seconds=60.0))
    silent, busy = joined(store, share=0.5), joined(store)
    names_ = Names(store)
    for _ in range(3):
        names_.put(4, 4, env=busy, now=50.0)
    assert store.take(50.0) is None
    assert store.status(50.0)["waits_for"] == "environment e_0 has 0 of the 4 sequences its share asks for"
    assert names(store.take(60.1)) == ["0", "1"]
    assert store.status_env(busy, 60.1).unallocated_fraction == 1.0
    store.status_env(silent, 61.0)
    assert store.status_env(busy, 61.0).unallocated_fraction == 0.5
    assert store.take(61.0) is None
    names_.put(4, env=silent, now=61.0)
    assert names(store.take(61.0)) == ["6", "2"]


def test_disconnecting_frees_a_share_at_once_and_for_good() -> None:
    store = started(8)
    gone, here = joined(store, share=0.5), joined(store)
    Names(store).put(4, 4, env=here)
    store.disconnect(gone, 0.0)
    store.status_env(gone, 0.0)
    assert names(store.take(0.0)) == ["0", "1"]
    assert [(env["connected"], env["left"]) for env in store.status(0.0)["envs"]] == [(False, True), (True, False)]


def test_shares_are_relaxed_only_if_sizes_allow_nothing_else() -> None:
    """Two halves of 9 in groups of 3: 4 each would be two groups each, 12 sequences."""
    store = started(9)
    a, b = joined(store, group_size=3, share=0.5), joined(store, group_size=3, share=0.5)
    put = Names(store).put
    put(3, 3, 3, env=a)
    put(3, env=b)
    assert store.take(0.0) is None  # b has less than its share: wait for it
    put(3, env=b)
    batch = some(store.take(0.0))
    assert {entry.env for entry in batch.entries} == {a, b}


def test_after_a_reset_running_environments_live_on_and_ids_are_not_reused() -> None:
    store = started(4)
    old = joined(store, share=0.5)
    Names(store).put(4, 4)
    store.reset()
    store.reset()  # before anybody has spoken again
    assert store.take(0.0) is None
    assert (store.step, store.status(0.0)["queued_groups"], store.waiting.latest, store.run) == (0, 0, None, None)
    store.register(run(4))
    store.take(0.0)
    new = joined(store)
    assert new != old
    assert store.status_env(new, 0.0).unallocated_fraction == 1.0  # the old one has not spoken
    assert store.status_env(old, 0.0).unallocated_fraction == 0.5
    assert [env["name"] for env in store.status(0.0)["envs"]] == ["e_0", "e_1", "anonymous"]


def test_the_same_identity_is_the_same_environment() -> None:
    store = started(8)
    first = joined(store, group_size=4, key="me")
    assert joined(store, group_size=3, weight=2.0, key="me") == first
    assert joined(store) != first


# --- leases ---


def test_a_batch_not_acknowledged_in_time_comes_back_to_the_front() -> None:
    store = started(8)
    Names(store).put(4, 4, 4, 4)
    batch = some(store.take(0.0, lease=10.0))
    assert names(store.take(9.0, lease=600.0)) == ["2", "3"]
    assert store.take(9.0, lease=600.0) is None
    again = some(store.take(10.0, lease=600.0))
    assert names(again) == ["0", "1"]
    assert store.step == 2  # served again is not another step
    assert again.id != batch.id


def test_of_two_leases_with_the_same_groups_the_first_acknowledgement_wins() -> None:
    store = started(4)
    Names(store).put(4)
    first = some(store.take(0.0, lease=10.0))
    second = some(store.take(10.0, lease=600.0))
    assert store.acknowledge(first.id, 11.0) == ""
    loser = store.acknowledge(second.id, 12.0)
    assert loser.startswith("1 groups of batch")
    assert "trained by another batch" in loser
    assert store.acknowledge(second.id, 13.0) == loser
    counts = store.status(13.0)["counts"]
    assert (counts["trained"], counts["doubled"]) == (1, 1)
    assert store.take(5000.0) is None


@pytest.mark.parametrize("release", [True, False])
def test_groups_trained_late_do_not_come_back_with_another_lease(release: bool) -> None:
    store = started(4)
    Names(store).put(4)
    first = some(store.take(0.0, lease=10.0))
    second = some(store.take(10.0, lease=10.0))
    store.acknowledge(first.id, 11.0)
    if release:
        store.return_lease(second.id, 12.0)
    assert store.take(30.0) is None
    assert (store.status(0.0)["queued_groups"], store.status(30.0)["held_bytes"]) == (0, 0)


# --- versions ---


def test_groups_are_stamped_with_the_policy_step_and_stale_ones_dropped() -> None:
    store = started(4)
    put = Names(store).put
    put(4)
    put(4, version=3)
    assert names(store.take(0.0, policy=2)) == ["0"]
    put(4)
    put(4, version=7)
    batch = store.take(0.0, policy=4, max_lag=1)
    assert names(batch) == ["1"]
    assert names(store.take(0.0, policy=4, max_lag=1)) == ["3"]  # the one stamped 2 is dropped
    assert store.status(0.0)["counts"]["dropped"] == 1
    assert store.policy_step == 4


# --- keys and bounds ---


def test_a_key_is_accepted_once_and_remembered_for_a_while() -> None:
    store = started(4, StoreOptions(key_seconds=100.0, max_keys=3))
    entry = GroupEntry(id="x", env=None, size=4, payload=b"")
    kinds = [store.put(entry, now, key="k").kind for now in (0.0, 100.0, 101.0, 150.0)]
    assert kinds == ["received", "duplicate", "received", "duplicate"]
    for k in range(4):
        store.put(entry, 150.0, key=str(k))
    assert store.put(entry, 150.0, key="k").kind == "received"  # pushed out by newer ones


def test_a_list_is_accepted_whole_or_not_at_all() -> None:
    store = started(4)
    small, large = (GroupEntry(id=str(size), env=None, size=size, payload=b"") for size in (4, 5))
    with pytest.raises(GroupRefused):
        store.put_all([(small, "a"), (large, "b")], 0.0)
    assert store.status(0.0)["queued_groups"] == 0
    assert [receipt.kind for receipt in store.put_all([(small, "a"), (small, "a")], 0.0)] == ["received", "duplicate"]


def test_too_much_is_put_off_and_memory_stays_flat() -> None:
    store = started(4, StoreOptions(max_groups=10))
    put = Names(store).put
    put(*[4] * 10)
    for _ in range(90):
        with pytest.raises(Busy, match="holds 10 groups"):
            put(4)
    assert store.status(0.0)["queued_groups"] == 10
    batch = some(store.take(0.0, lease=600.0))
    with pytest.raises(Busy, match="holds 10 groups"):  # leased ones are held too
        put(4)
    store.acknowledge(batch.id, 0.0)
    put(4)


def test_a_full_queue_lets_in_what_a_share_waits_for() -> None:
    store = started(8, StoreOptions(max_groups=6))
    greedy, needed = joined(store), joined(store, share=0.5)
    put = Names(store).put
    put(4, 4, 4, 4, 4, 4, env=greedy)
    with pytest.raises(Busy):
        put(4, env=greedy)
    put(4, env=needed)
    with pytest.raises(Busy):  # a batch can be formed now
        put(4, env=needed)
    assert names(store.take(0.0)) == ["6", "0"]


def test_environments_are_bounded() -> None:
    store = started(4, StoreOptions(max_environments=2))
    first = joined(store)
    joined(store)
    with pytest.raises(Busy):
        joined(store)
    store.disconnect(first, 0.0)
    assert joined(store) == 2
    with pytest.raises(GroupRefused):
        store.status_env(first, 0.0)


def test_environments_follow_the_steps_of_a_trainer_that_tells_them() -> None:
    """It may take several batches for one step; the last step is done when nothing is out any more."""
    store = GroupQueue()
    store.register(run_parameters(batch_size=1, num_steps=3))
    store.take(0.0, policy=0)
    env = joined(store)
    Names(store).put(*[1] * 8)

    def current_step() -> int:
        return store.status_env(env, 0.0).current_step

    assert current_step() == 0
    for policy, then in ((0, 1), (0, 1), (1, 2), (1, 2), (1, 2), (2, 2)):
        assert store.take(0.0, lease=600.0, policy=policy) is not None
        assert current_step() == then
    assert store.step == 6
    for lease in list(store.leases):
        assert current_step() == 2
        store.acknowledge(lease, 0.0)
    assert current_step() == 3
    store.take(0.0, policy=3)
    assert current_step() == 4  # one more is being trained on
    store.take(0.0, lease=600.0)
    assert store.take(0.0, policy=4) is None
    assert current_step() == 4, "nothing was served for this step yet"
