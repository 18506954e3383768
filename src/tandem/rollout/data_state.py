"""Data state: where the rollout buffer stands, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tandem.algorithms.curricula.base import SolveCount, TaskHistory
from tandem.types import Group, Json


class Draw(NamedTuple):
    """A drawn task of an environment: by its place in the shuffled epochs, or as a curriculum chose it."""

    env: str
    """The environment's name in the run."""
    number: int
    """Tasks of the environment drawn before it."""
    again: int = 0
    """Times that it was drawn again because it was unsolved."""
    task: int | None = None
    """The task's place in the environment, where a curriculum chose it."""


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
    """Tasks drawn so far of each environment, by its name."""
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
    seen: Mapping[str, Mapping[int, TaskHistory]] = field(default_factory=dict)
    """What came of each task, by environment and the task's place in it, where a curriculum asks."""
    tasks: Mapping[str, TasksMark] = field(default_factory=dict)
    """What tells each environment's tasks from others: all of this counts places among them."""

    def to_json(self) -> dict[str, Json]:
        """Plain data."""
        return {
            "taken": self.taken,
            "drawn": dict(self.drawn),
            "admitted": self.admitted,
            "again": [_draw(draw) for draw in self.again],
            "again_indices": list(self.again_indices),
            "ready": [[_draw(draw), group_to_json(group)] for draw, group in self.ready],
            "resting": dict(self.resting),
            "batches": list(self.batches),
            "stored": [[_draw(draw), group_to_json(group), times] for draw, group, times in self.stored],
            "unsolved": [_draw(draw) for draw in self.unsolved],
            "rerolled": list(self.rerolled),
            "refilled": self.refilled,
            "seen": {
                name: [[place, seen.at, seen.played, *map(list, seen.recent)] for place, seen in tasks.items()]
                for name, tasks in self.seen.items()
            },
            "tasks": {name: list(mark) for name, mark in self.tasks.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> DataState:
        """Inverse of ``to_json``; raises KeyError, TypeError or ValueError where something is missing."""
        return cls(
            taken=data["taken"],
            drawn=data["drawn"],
            admitted=data["admitted"],
            again=tuple(Draw(*draw) for draw in data["again"]),
            again_indices=tuple(data.get("again_indices", ())),
            ready=tuple((Draw(*draw), group_from_json(group)) for draw, group in data["ready"]),
            resting=data.get("resting", {}),
            batches=tuple(data.get("batches", ())),
            stored=tuple(
                StoredGroup(Draw(*draw), group_from_json(group), times) for draw, group, times in data.get("stored", ())
            ),
            unsolved=tuple(Draw(*draw) for draw in data.get("unsolved", ())),
            rerolled=tuple(data.get("rerolled", ())),
            refilled=data.get("refilled", 0),
            seen={
                name: {
                    place: TaskHistory(played, tuple(SolveCount(*one) for one in recent), at)
                    for place, at, played, *recent in tasks
                }
                for name, tasks in data.get("seen", {}).items()
            },
            tasks={name: TasksMark(*mark) for name, mark in data.get("tasks", {}).items()},
        )


def _draw(draw: Draw) -> list[Json]:
    """What is as usual is left out."""
    return list(draw if draw.again or draw.task is not None else draw[:2])


def group_to_json(group: Group) -> Any:
    """Plain data of a group, for a checkpoint."""
    return msgspec.to_builtins(group)


def group_from_json(data: Json) -> Group:
    """Inverse of ``group_to_json``."""
    return msgspec.convert(data, Group)
