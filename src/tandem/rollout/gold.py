"""Gold answers against graders: a reward that refuses the right answer is found before anything is trained."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from itertools import islice

from tandem.envs.base import Environment
from tandem.errors import RewardError
from tandem.rewards._workers import Graders
from tandem.types import Completion, Message, Rollout, Task, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldFailure:
    """A gold reply that did not get full marks."""

    task: str
    """Id of the task."""
    reward: str
    """Name of the reward; empty if grading itself failed."""
    got: float | None
    """What it gave; None if nothing."""
    expected: float | None
    """Full marks; None if grading itself failed."""
    reply: str
    """The gold reply."""
    error: str = ""
    """What failed while grading."""

    def __str__(self) -> str:
        if self.error:
            return f"task {self.task}: {self.error}"
        got = "nothing" if self.got is None else f"{self.got:g}"
        return f"task {self.task}: reward {self.reward!r} gives the gold reply {got}, expected {self.expected:g}"


async def check_environment(env: Environment, graders: Graders, tasks: int) -> list[GoldFailure]:
    """Grade the gold replies of the first train tasks; an empty list means that all got full marks."""
    failures: list[GoldFailure] = []
    unknown = 0
    for task in islice(env.tasks("train"), tasks):
        reply = env.check(task)
        if reply is None:
            unknown += 1
            continue
        (graded,) = await graders.grade([gold_rollout(task, reply)])
        failures += _failures(graded, graders, reply)
    if unknown:
        logger.warning("%s knows no gold reply to %d of %d tasks: they were not checked", env.name, unknown, tasks)
    return failures


async def require_full_marks(name: str, env: Environment, graders: Graders) -> None:
    """Grade the first two gold replies of an environment, called ``name`` in this run.

    Raises:
        RewardError: one did not get full marks.
    """
    if failures := await check_environment(env, graders, 2):
        raise RewardError(
            f"a gold reply of {name} did not get full marks: {failures[0]}; mend the reward or what the environment's "
            "check() replies (tandem check looks at more of them)"
        )
    graders.metrics()  # these are nobody's rollouts


def gold_rollout(task: Task, reply: str) -> Rollout:
    """A rollout that says the reply in one turn."""
    said = Completion(tokens=(0,), logprobs=(0.0,), versions=(0,), finish="stop")
    return Rollout(
        id=f"{task.id}@gold/0",
        task=task,
        turns=(Turn(prompt=(0,), completion=said, temperature=1.0),),
        messages=(*task.prompt, Message(role="assistant", content=reply)),
        status="ok",
    )


def _failures(graded: Rollout, graders: Graders, reply: str) -> list[GoldFailure]:
    if graded.status == "error":
        return [GoldFailure(task=graded.task.id, reward="", got=None, expected=None, reply=reply, error=graded.error)]
    return [
        GoldFailure(task=graded.task.id, reward=name, got=graded.rewards.get(name), expected=full, reply=reply)
        for name, full in graders.full_marks.items()
        if full is not None and not math.isclose(graded.rewards.get(name, math.nan), full, abs_tol=1e-9)
    ]
