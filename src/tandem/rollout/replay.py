"""Replay buffer: trained groups that had signal, kept to take the place of zero-variance groups.

A replayed group is trained with the logprobs of its own sampler, however old: the objective computes the
policy's anew in every step, so ratios and corrections see how far the two have come apart since. It is as old as
``max_age`` allows when it is trained at the latest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tandem.config.sections import Replay
from tandem.rollout.source import Draw, StoredGroup
from tandem.types import Group


class ReplayBuffer:
    """The newest trained groups that had signal."""

    def __init__(self, options: Replay) -> None:
        """As large as the recipe says."""
        self._options = options
        self.stored: list[StoredGroup] = []
        """What is kept, oldest first."""

    def add(self, draw: Draw, group: Group) -> None:
        """Keep a group that is being trained, unless it is zero-variance or comes from here."""
        if self._options.size and not group.replayed and not group.zero_variance:
            self.stored = [*self.stored, StoredGroup(draw, group, 0)][-self._options.size :]

    def take(self, env: str, *, step: int, taken: Collection[str]) -> tuple[Draw, Group] | None:
        """A group of an environment to be trained once more, or None if there is none.

        The one that was replayed least, of these the youngest: every group gets its turn while it is fresh. How much
        signal it has plays no part, for that would bend the gradient towards some tasks.

        Args:
            env: the environment's name.
            step: policy step that it is trained at, at the latest.
            taken: ids of groups that wait to be trained: none is twice in a batch.
        """
        self.stored = [entry for entry in self.stored if step - entry.group.version_min <= self._options.max_age]
        fitting = [
            (entry.times, -entry.group.version_min, -entry.group.index, at)
            for at, entry in enumerate(self.stored)
            if entry.draw.env == env and entry.group.id not in taken
        ]
        if not fitting:
            return None
        *_, at = min(fitting)
        draw, group, times = self.stored[at]
        self.stored[at] = StoredGroup(draw, group, times + 1)
        return draw, dataclasses.replace(group, replayed=times + 1)
