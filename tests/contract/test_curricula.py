"""What every curriculum keeps."""

from __future__ import annotations

import itertools

import pytest

from tandem.algorithms.curricula.base import Curriculum, SolveCount, TaskHistory
from tandem.config.registry import find, names
from tandem.types import Task

TASK = Task(id="t", env="e", prompt=(), answer="")


@pytest.fixture(params=names("curricula"))
def curriculum(request: pytest.FixtureRequest) -> Curriculum:
    return find("curricula", request.param)()  # type: ignore[no-any-return]


def histories() -> list[TaskHistory]:
    """Nothing, plays without an answer, and all outcomes of one and two plays of four answers."""
    plays = [SolveCount(solved, 4) for solved in range(5)]
    two = [TaskHistory(2, pair) for pair in itertools.product(plays, plays)]
    return [
        TaskHistory(),
        TaskHistory(1, (SolveCount(0, 0),)),
        *(TaskHistory(1, (one,)) for one in plays),
        *two,
        TaskHistory(99, (plays[2],) * 4),
    ]


def test_weights_are_from_0_to_1_and_a_task_never_played_has_one(curriculum: Curriculum) -> None:
    weights = [curriculum.weight(TASK, seen) for seen in histories()]
    assert all(0.0 <= weight <= 1.0 for weight in weights)
    assert weights[0] > 0.0


def test_the_same_history_has_the_same_weight(curriculum: Curriculum) -> None:
    again = find("curricula", type(curriculum).__module__.rpartition(".")[2])()
    assert [curriculum.weight(TASK, seen) for seen in histories()] == [again.weight(TASK, s) for s in histories()]
