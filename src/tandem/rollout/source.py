"""Rollout source: where the training loop's batches come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tandem.metrics import Value
from tandem.rollout.data_state import DataState
from tandem.types import Group


@dataclass(slots=True, eq=False)
class Batch:
    """The groups of one optimizer step, with the admission slots that they hold until ``free_slots``."""

    groups: Sequence[Group]
    """In order of admission."""
    position: Callable[[], DataState]
    """Returns the present data state of their source."""
    free: Callable[[], None]
    """Frees their slots, so that the source requests the next groups."""
    supervised: bool = False
    """The groups are demonstrations."""
    _at_free: DataState | None = None

    def free_slots(self) -> None:
        """Free the slots, once: the requests of the next batch may be made. Again does nothing."""
        if self._at_free is None:
            self._at_free = self.position()
            self.free()

    @property
    def data_state(self) -> DataState:
        """What a checkpoint of this batch's step holds: as it was before its slots were freed."""
        return self.position() if self._at_free is None else self._at_free

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


class RolloutSource(Protocol):
    """Batches of groups sampled here (``buffer.RolloutBuffer``) or elsewhere (``tandem_broker.run_source``)."""

    def open(self, data_state: DataState) -> AbstractAsyncContextManager[RolloutSource]:
        """Go on where ``data_state`` stands."""

    async def take(self) -> Batch:
        """The groups of one optimizer step; they count as trained in every later ``data_state``."""

    def data_state(self) -> DataState:
        """The present data state."""

    async def saved(self, data_state: DataState) -> None:
        """A checkpoint that holds ``data_state`` is on disk: its groups need not be served again."""

    def metrics(self) -> Mapping[str, Value]:
        """Metrics of the groups since the last call."""
