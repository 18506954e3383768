"""Formation of batches from groups, and of groups from partial ones: pure functions over sizes in arrival order.

One rule for both: of all selections whose sizes add up exactly, the one that takes the oldest group, then the next
oldest, and so on. So a selection is found whenever one exists, the oldest group that can be used is used, and of groups
of one size the older always goes first. For groups of equal size this is plain first in, first out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

from tandem_broker.queue.tenants import Item

BY_ORDER = attrgetter("order")


def earliest(items: Iterable[Item], total: int) -> list[Item] | None:
    """The selection of ``items`` (in arrival order) that adds up to exactly ``total`` and takes the oldest; or None."""
    pool: list[Item] = []
    seen: Counter[int] = Counter()
    gathered = 0
    for item in items:  # more of a size than could fit can never be needed
        if seen[item.size] < total // item.size:
            seen[item.size] += 1
            pool.append(item)
            gathered += item.size
            if gathered == total:  # most often the oldest simply add up
                return pool
    mask, sums = (1 << (total + 1)) - 1, [1]  # of what comes behind each item, bit k: some of it adds up to k
    for item in reversed(pool):
        sums.append((sums[-1] | sums[-1] << item.size) & mask)
    if not sums.pop() >> total & 1:
        return None
    taken, left = [], total
    for item, behind in zip(pool, reversed(sums), strict=True):
        if item.size <= left and behind >> (left - item.size) & 1:
            taken.append(item)
            left -= item.size
    return taken


def in_packs(items: Sequence[Item]) -> list[Item]:
    """Smaller groups gathered until they fill up the largest size, packs in the order in which they became full.

    A trainer that cuts a batch into pieces of the largest size in this order seldom cuts through a group.
    """
    largest = max((item.size for item in items), default=0)
    waiting: dict[int, list[Item]] = {}
    packed: list[Item] = []
    for item in items:
        pack = waiting.setdefault(item.size, [])
        pack.append(item)
        if len(pack) * item.size >= largest:
            packed += waiting.pop(item.size)
    return packed + sorted((item for pack in waiting.values() for item in pack), key=BY_ORDER)


def batch(total: int, reserved: Sequence[tuple[int, Sequence[Item]]], others: Sequence[Item]) -> list[Item] | None:
    """Groups that add up to exactly ``total`` with at least ``need`` sequences out of each reserved line; or None.

    Each minimum is taken from the oldest of its line, and the rest from the oldest of everything that is left.

    Args:
        total: sequences of a batch.
        reserved: ``(need, groups in arrival order)`` of each environment with a minimum.
        others: all other groups, in arrival order.
    """
    taken: list[Item] = []
    left = total
    for need, line in reserved:
        for item in line:
            if need <= 0:
                break
            if item.size <= left:
                taken.append(item)
                need, left = need - item.size, left - item.size
        if need > 0:
            return None
    used = {item.order for item in taken}
    lines = [[item for item in line if item.order not in used] for _, line in reserved]
    rest = earliest(sorted(chain(*lines, others), key=BY_ORDER), left)
    return None if rest is None else taken + rest
