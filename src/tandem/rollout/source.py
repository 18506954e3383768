"""Rollout source: where the training loop's batches come from, and its data state, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tandem.algorithms.curricula.base import TaskHistory
from tandem.metrics import Value
from tandem.types import Group


class Draw(NamedTuple):
    """A drawn task of an environment, by its place in the shuffled epochs."""

    env: str
    """The environment's name in the run."""
    number: int
    """Tasks of the environment before it, those that a curriculum left out included."""
    again: int = 0
    """Times that it was drawn again because it was unsolved."""


class TasksMark(NamedTuple):
    """What tells the tasks of an environment from others."""

    number: int
    """How many there are."""
    digest: str
    """Of ids, prompts and answers, of many tasks those of some evenly over all."""


class StoredGroup(NamedTuple):
    """A trained group in the replay buffer."""

    draw: Draw
    """What it was drawn as."""
    group: Group
    """As it was sampled and scored."""
    times: int
    """How often it was trained again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataState:
    """State of the rollout buffer that a resume needs."""

    taken: int = 0
    """Batches handed out so far."""
    drawn: Mapping[str, int] = field(default_factory=dict)
    """Tasks so far of each environment, by its name; those that a curriculum left out included."""
    admitted: int = 0
    """Groups admitted so far, repeats of stale ones included."""
    again: tuple[Draw, ...] = ()
    """Draws that were admitted but neither trained nor scored: they are played first, in this order."""
    again_indices: tuple[int, ...] = ()
    """Place of each of these in the order of admission, where they are not counted anew; -1: it is admitted anew."""
    ready: tuple[tuple[Draw, Group], ...] = ()
    """Groups scored and not yet trained, each with its draw."""
    resting: Mapping[str, int] = field(default_factory=dict)
    """Environments that are left out since they gave nothing to train on, each with the batch that tries it again."""
    batches: tuple[str, ...] = ()
    """A broker's batches whose groups were trained or dropped, or are in ``ready``, but not yet acknowledged."""
    stored: tuple[StoredGroup, ...] = ()
    """Groups that may take the place of zero-variance ones, oldest first."""
    unsolved: tuple[Draw, ...] = ()
    """Unsolved tasks, in the order in which they will be drawn again."""
    rerolled: tuple[int, ...] = ()
    """The batch of each of these that was drawn for a batch which is not complete yet."""
    refilled: int = 0
    """Zero-variance groups that were replaced since the last batch was taken."""
    signal: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of each environment the groups that had signal and all that were scored, older ones counting less."""
    seen: Mapping[str, Mapping[int, TaskHistory]] = field(default_factory=dict)
    """What came of each task, by environment and the task's place in it, where a curriculum asks."""
    tasks: Mapping[str, TasksMark] = field(default_factory=dict)
    """What tells each environment's tasks from others: all of this counts places among them."""


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
