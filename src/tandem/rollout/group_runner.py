"""Group runner: plays one task G times and scores the siblings. A failure belongs to the rollout it happened in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Literal, TypeVar

from tandem.engines.base import Sampler
from tandem.envs.base import Environment
from tandem.errors import Deadline, EngineError, EnvError, TandemError, defined_at, message_of, place_of
from tandem.observability import waits
from tandem.rewards.grading.workers import Graders
from tandem.rollout.chat import EngineChat
from tandem.rollout.teacher import Score, judged
from tandem.rollout.template import Template
from tandem.rollout.turns import last_completion
from tandem.types import Group, Rollout, Sampling, Task

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """Plays the tasks of one environment with one engine, a group at a time."""

    name: str
    """Name of the environment in this run, which its groups carry."""
    env: Environment
    """The environment, which plays the tasks."""
    engine: Sampler
    """The engine, which samples."""
    graders: Graders
    """The graders, which score."""
    template: Template
    """Turns messages into tokens."""
    seed: int
    """Seed of the run; with a group's id it fixes every random stream."""
    teacher: Score | None = None
    """Gives each token its advantage, where answers are to be as a teacher's."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """What becomes of answers that a length limit cut."""
    truncated_penalty: float = 0.0
    """What penalise subtracts from their reward."""
    _warned: set[str] = field(default_factory=set, init=False)
    """Kinds of failures of which the first was a warning."""

    async def run(self, task: Task, *, id: str, index: int, size: int, sampling: Sampling) -> Group:
        """Play ``size`` siblings at once, and score each as it ends where no reward needs the others.

        Raises:
            EngineError: the engine failed, which is no single rollout's fault.
        """
        prompt = tuple(self.template.prompt(task.prompt))  # one for all: it is written to the graders once
        finishes = type(self.env).finish is not Environment.finish
        singly = self.graders.singly and not finishes

        async def answer(number: int) -> Rollout:
            rollout = await self._play(task, prompt, f"{id}/{number}", sampling)
            return await self._graded(id, self.graders.grade_one(rollout)) if singly else rollout

        rollouts: Sequence[Rollout] = await asyncio.gather(*map(answer, range(size)))
        if finishes:
            rollouts = await self._finished(id, rollouts)
        graded = rollouts if singly else await self._graded(id, self.graders.grade(rollouts))
        group = Group(id=id, index=index, env=self.name, rollouts=tuple(map(self._cut, graded)))
        if self.teacher is None:
            return group
        judging = judged(group, self.teacher)
        return await waits.wait(judging, owner=f"rollouts group {id}", reason="its tokens' advantages", on="teacher")

    async def _graded(self, id: str, grading: Awaitable[T]) -> T:
        return await waits.wait(grading, owner=f"rollouts group {id}", reason="rewards", on=f"grading of {id}")

    def _cut(self, rollout: Rollout) -> Rollout:
        """With what becomes of it where it was cut; its reward counts in its group in any case."""
        if self.truncated == "keep" or not rollout.truncated:
            return rollout
        if self.truncated == "mask":
            return replace(rollout, trained=False)
        return rollout if rollout.reward is None else replace(rollout, reward=rollout.reward - self.truncated_penalty)

    async def _play(self, task: Task, prompt: tuple[int, ...], id: str, sampling: Sampling) -> Rollout:
        chat = EngineChat(self.engine, self.template, task, sampling, f"{self.seed}/{id}", prompt, id)
        group, party, begun = id.rpartition("/")[0], f"environment {self.name} ({id})", time.monotonic()
        try:
            playing = self.env.play(task, chat)
            who = f"rollouts group {group}"
            metrics = self._metrics(await waits.wait(playing, owner=who, reason=f"rollout {id}", on=party))
        except EngineError:
            raise
        except Exception as error:
            if isinstance(error, Deadline) and error.on != party and not await self._answers(begun):
                raise  # not this rollout's fault either
            failure = self._failure(id, error)
            return Rollout(id=id, task=task, turns=chat.turns, messages=chat.messages, status="error", error=failure)
        return Rollout(id=id, task=task, turns=chat.turns, messages=chat.messages, status="ok", metrics=metrics)

    async def _finished(self, id: str, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """What the environment makes of siblings; all that were played have failed where it does."""
        try:
            finishing, party = self.env.finish(rollouts), f"environment {self.name} ({id})"
            return await waits.wait(finishing, owner=f"rollouts group {id}", reason="scores", on=party)
        except Exception as error:
            failure = self._failure(id, error)
            return [replace(r, status="error", error=failure) if r.status == "ok" else r for r in rollouts]

    def _failure(self, id: str, error: Exception) -> str:
        """The boundary of a rollout or group: whatever the environment did wrong becomes data on it."""
        text = str(error) if isinstance(error, TandemError) else f"{message_of(error)}{place_of(error)}"
        kind = f"{type(error).__name__}{place_of(error)}"
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        log.log(level, "rollout %s: environment %s failed: %s", id, self.name, text, exc_info=True)
        return f"environment: {text}"

    def _metrics(self, metrics: object) -> dict[str, float]:
        """What ``play`` returned, if it is numbers by name; else an error that names the environment."""
        if not isinstance(metrics, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Real) for name, value in metrics.items()
        ):
            what = f"play(){defined_at(type(self.env).play)} returned {metrics!r:.200}"
            raise EnvError(f"{what}; expected a mapping of numbers by name, such as {{}}")
        return {name: float(value) for name, value in metrics.items()}

    async def _answers(self, since: float) -> bool:
        """True if the engine is healthy, and has completed any request since."""
        return last_completion.get(self.engine, 0.0) > since and (await self.engine.health()).ok
