"""Prefix trees: sequences that begin alike, packed so that every shared token is computed once.

Lengths and depths are in tokens. A depth is a place in a sequence: two sequences that part at depth d have d tokens in
common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LEAST = 16
"""Fewest tokens between two depths at which sequences part. A segment more costs every layer another piece of
attention, which a few tokens that answers happen to begin with do not repay."""

Ints = NDArray[np.int64]


class PrefixTree:
    """Sequences of one group, and how many leading tokens each two of them share."""

    def __init__(self, sequences: Sequence[Ints]):
        self.sequences = tuple(sequences)
        self.lengths = [len(sequence) for sequence in sequences]
        # Big-endian bytes are ordered as their numbers are, and compared at the speed of memory.
        keys = [sequence.astype(">i8").tobytes() for sequence in sequences]
        self.order = sorted(range(len(keys)), key=keys.__getitem__)
        self.rank = {i: rank for rank, i in enumerate(self.order)}
        alike = [_alike(sequences[a], sequences[b]) for a, b in pairwise(self.order)]
        # Depths are the same for all of the group: then what two share does not depend on what else is there.
        kept = np.asarray(_kept(alike))
        depths = kept[np.searchsorted(kept, alike, side="right") - 1] if alike else kept[:0]
        # Sequences that are the same part nowhere: no segment more, however few tokens it saves.
        same = [self.lengths[a] == self.lengths[b] == n for n, (a, b) in zip(alike, pairwise(self.order), strict=True)]
        depths = np.where(same, alike, depths)
        # Of neighbours in this order, two that are further apart share the least that any pair in between does.
        self._shared = [np.minimum.accumulate(depths[i:]).tolist() for i in range(len(depths))]

    def shared(self, a: int, b: int) -> int:
        """Leading tokens that two different sequences have in common, as far as the tree shares them."""
        low, high = sorted((self.rank[a], self.rank[b]))
        depth: int = self._shared[low][high - low - 1]
        return depth


@dataclass(slots=True)
class PackedRow:
    """A packed row under construction."""

    size: int = 0
    """Tokens so far."""
    tokens: list[Ints] = field(default_factory=list)
    """Parts of the row, one after another."""
    lengths: list[int] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    """The segment that each one continues."""

    def add(self, tree: PrefixTree, members: Sequence[int]) -> dict[int, Ints]:
        """Append some sequences of a group as a tree; the place in the row of each of their tokens."""
        members = sorted(members, key=tree.rank.__getitem__)
        # What each shares with the one before it.
        depths = [0, *(tree.shared(a, b) for a, b in pairwise(members))]
        places: dict[int, Ints] = {}
        before = np.empty(0, dtype=np.int64)
        for i, depth in zip(members, depths, strict=True):
            new = tree.lengths[i] - depth
            before = np.concatenate((before[:depth], np.arange(self.size, self.size + new)))
            places[i] = before
            self.tokens.append(tree.sequences[i][depth:])
            self.size += new
        self._segments([tree.lengths[i] for i in members], depths)
        return places

    def _segments(self, lengths: Sequence[int], depths: Sequence[int]) -> None:
        """Each sequence adds a branch, from its depth to its end; branches are cut where later ones leave them."""
        left: list[set[int]] = []
        leaves: list[int | None] = []
        path: list[int] = []  # branches that the sequence before consists of
        for i, depth in enumerate(depths):
            while path and depths[path[-1]] >= depth:
                path.pop()
            leaves.append(path[-1] if path else None)
            if path:
                left[path[-1]].add(depth)
            left.append({lengths[i]})
            path.append(i)
        ends: dict[tuple[int, int], int] = {}  # by branch and depth: the segment that ends there
        for i, depth in enumerate(depths):
            branch = leaves[i]
            parent = None if branch is None else ends[branch, depth]
            start = depth
            for end in sorted(left[i]):
                if end > start:
                    self.lengths.append(end - start)
                    self.parents.append(parent)
                    parent = ends[i, end] = len(self.lengths) - 1
                    start = end


def _alike(a: Ints, b: Ints) -> int:
    """Leading tokens that are the same."""
    n = min(len(a), len(b))
    return int(np.append(a[:n] != b[:n], True).argmax())


def _kept(depths: Sequence[int]) -> list[int]:
    """Depths at which it pays to part, ascending from 0."""
    kept = [0]
    for depth in sorted(set(depths)):
        if depth - kept[-1] >= LEAST:
            kept.append(depth)
    return kept
