"""Batch formation: exact, oldest first, and never stuck while some selection adds up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_broker.protocol.submission import GroupEntry
from tandem_broker.queue import formation
from tandem_broker.queue.tenants import ANONYMOUS, Item, Tenant, minimums

TENANT = Tenant(env_id=None, spec=ANONYMOUS, name="", heard=0.0)
SIZES = st.lists(st.integers(1, 9), max_size=10)
EVERY = settings(max_examples=100)  # in each tier: an example takes no time


def items(sizes: Sequence[int], first: int = 0, step: int = 1) -> list[Item]:
    return [
        Item(first + step * k, GroupEntry(id=str(k), env=None, size=size, payload=b""), TENANT, "queued")
        for k, size in enumerate(sizes)
    ]


def orders(chosen: Sequence[Item] | None) -> list[int] | None:
    return None if chosen is None else [item.order for item in chosen]


def sizes(chosen: Sequence[Item] | None) -> list[int]:
    return [item.size for item in chosen or ()]


def by_hand(numbers: Sequence[int], total: int) -> list[int] | None:
    """The first selection, in the order in which one compares those that take the older group, by trying all."""
    exact = [
        pick
        for n in range(len(numbers) + 1)
        for pick in combinations(range(len(numbers)), n)
        if sum(numbers[k] for k in pick) == total
    ]
    return list(max(exact, key=lambda pick: [k in pick for k in range(len(numbers))])) if exact else None


@pytest.mark.slow
@EVERY
@given(SIZES, st.integers(1, 24))
def test_earliest_is_what_trying_everything_finds(numbers: list[int], total: int) -> None:
    assert orders(formation.earliest(items(numbers), total)) == by_hand(numbers, total)


@EVERY
@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=4)), max_size=3),
    st.lists(st.integers(1, 5), max_size=4),
)
def test_a_batch_adds_up_and_meets_its_minimums(
    total: int, reserved: list[tuple[int, list[int]]], others: list[int]
) -> None:
    lines = [(need, items(line, first=k, step=4)) for k, (need, line) in enumerate(reserved)]
    rest = items(others, first=3, step=4)
    chosen = formation.batch(total, lines, rest)
    if not reserved:
        assert (chosen is not None) == (by_hand(others, total) is not None)
    if chosen is not None:
        taken = set(orders(chosen) or ())
        assert len(taken) == len(chosen)
        assert sum(sizes(chosen)) == total
        for need, line in lines:
            assert sum(item.size for item in line if item.order in taken) >= need
        for line in [line for _, line in lines] + [rest]:  # first in, first out among equals
            for size in {item.size for item in line}:
                went = [item.order in taken for item in line if item.size == size]
                assert went == sorted(went, reverse=True)


@EVERY
@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=40))
def test_powers_of_two_never_wait_for_more_than_a_batch(numbers: list[int]) -> None:
    """As many batches as the sum allows: what the original's packs promise, and more than they keep."""
    left, batches = items(numbers), 0
    while chosen := formation.earliest(left, 8):
        left, batches = [item for item in left if item not in chosen], batches + 1
    assert batches == sum(numbers) // 8


def test_equal_sizes_are_first_in_first_out() -> None:
    assert orders(formation.earliest(items([4] * 9), 16)) == [0, 1, 2, 3]


def test_recorded_example_in_the_order_that_the_wire_shows() -> None:
    """Batch 4, arrivals 1, 2, 1, 4, 2, 1: served are 2 1 1, then 4; 2 and 1 wait."""
    waiting = items([1, 2, 1, 4, 2, 1])
    first = formation.in_packs(formation.earliest(waiting, 4) or [])
    assert (sizes(first), orders(first)) == ([2, 1, 1], [1, 0, 2])
    waiting = [item for item in waiting if item not in first]
    second = formation.earliest(waiting, 4) or []
    assert orders(second) == [3]
    assert formation.earliest([item for item in waiting if item not in second], 4) is None


def test_what_blocked_the_original_goes_through() -> None:
    """Sizes that do not divide the largest, and a head that does not fit."""
    assert orders(formation.earliest(items([3, 3, 1, 1, 1, 1]), 4)) == [0, 2]
    assert orders(formation.earliest(items([16, 4, 4]), 8)) == [1, 2]
    assert orders(formation.earliest(items([3, 1, 4]), 8)) == [0, 1, 2]


def test_packs_fill_up_the_largest_size() -> None:
    assert sizes(formation.in_packs(items([1, 4, 2, 1, 2, 1, 1, 4]))) == [4, 2, 2, 1, 1, 1, 1, 4]
    assert sizes(formation.in_packs(items([3, 2, 3]))) == [3, 3, 2]


@pytest.mark.parametrize(
    ("batch", "shares", "needs"),
    [
        (8, {0: 0.5, 1: 0.25}, {0: 4, 1: 2}),
        (8, {0: 0.1, 1: 0.0}, {}),
        (8, {0: 0.75, 1: 0.75}, {0: 4, 1: 4}),
        (4, {0: 1.0, 1: 0.25, 2: 0.25}, {0: 2, 1: 1, 2: 1}),
        (0, {0: 1.0}, {}),
    ],
)
def test_minimums(batch: int, shares: dict[int, float], needs: dict[int, int]) -> None:
    """A share too small for one sequence needs none; more than a batch together is scaled down."""
    assert minimums(batch, shares) == needs


@pytest.mark.slow
def test_many_sizes_in_a_large_batch_take_no_time() -> None:
    """Tens of thousands of candidates of sizes that do not fit well."""
    numbers = [3, 5, 7] * 20_000
    chosen = formation.earliest(items(numbers), 65_536)
    assert sum(sizes(chosen)) == 65_536
