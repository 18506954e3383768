"""Evaluation: mean@k and pass@k of the policy on held-out tasks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.config.loading import RunConfig
from tandem.observability import progress, trace
from tandem.observability.emit import Telemetry
from tandem.rollout.measure import interval, pass_at
from tandem.rollout.task_sampler import EnvRunner
from tandem.trainer.environments import Tasks
from tandem.types import Group, Json, Rollout, Sampling, Task

TaskResult = tuple[EnvRunner, Group]
"""One task, answered, and what played it."""

_SHOWN = 40
"""Answers kept in a record, one of each of the first tasks, as many of each environment."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates held-out tasks at the steps that are due."""

    config: RunConfig
    """Which steps are due, and how answers are sampled: by the same random streams at every evaluation."""
    runners: Sequence[EnvRunner]
    """Held-out tasks of each environment, and its runner."""
    telemetry: Telemetry | None = None
    """Told of evaluations, so that no step is evaluated twice; None outside of a run."""
    score: Callable[[Sequence[int]], Awaitable[Sequence[float]]] | None = None
    """The engine's: logprobs of the tokens but the first."""
    demonstrations: Sequence[Rollout] = ()
    """Given replies that are held out, whose loss is measured."""

    def wants(self, step: int) -> bool:
        """True if ``maybe`` would evaluate."""
        options = self.config.evaluate
        if not (self.runners or self.demonstrations) or (self.telemetry is not None and self.telemetry.evaluated(step)):
            return False
        if step == 0:
            return options.before
        return (step == self.config.steps and options.after) or (options.every > 0 and step % options.every == 0)

    async def maybe(self, step: int) -> None:
        """Evaluate if this step is due."""
        if self.telemetry is not None and self.wants(step):
            self.telemetry.evaluation(await self(step))

    @property
    def sampling(self) -> Sampling:
        """How answers are sampled."""
        return self.config.evaluate.sampling(self.config.sampling)

    async def __call__(self, step: int) -> dict[str, Json]:
        """Evaluate now; an ``eval.jsonl`` record."""
        begun = time.time()
        loss = await self._loss()
        pairs = [(runner, task) for runner in self.runners for task in runner.tasks]
        shown = progress.under_way("evaluating", total=len(pairs), unit="tasks")
        with trace.span("seconds/evaluate"), shown as played:
            # Their waits are registered where they are played.
            groups = await asyncio.gather(*(self._group(*pair, i, played) for i, pair in enumerate(pairs)))
        results = [(runner, group) for (runner, _), group in zip(pairs, groups, strict=True)]
        return {**self._record(step, results, time.time() - begun), **loss}

    async def _loss(self) -> dict[str, Json]:
        """Cross entropy of the held-out replies, nats per token: by the engine, which serves the policy of now."""
        turns = [turn for rollout in self.demonstrations for turn in rollout.turns if turn.trained]
        if not turns or self.score is None:
            return {}
        with trace.span("seconds/evaluate"):
            scored = await asyncio.gather(*(self.score([*turn.prompt, *turn.completion.tokens]) for turn in turns))
        logprobs = [p for turn, each in zip(turns, scored, strict=True) for p in each[len(turn.prompt) - 1 :]]
        return {"loss": -math.fsum(logprobs) / len(logprobs), "replies": len(self.demonstrations)}

    async def _group(self, runner: EnvRunner, task: Task, index: int, played: progress.Progress) -> Group:
        """One task's answers."""
        id, size = f"{runner.label}{task.id}@eval", self.config.evaluate.samples
        group = await runner.group_runner.run(task, id=id, index=index, size=size, sampling=self.sampling)
        played.advance()
        return group

    def _record(self, step: int, results: Sequence[TaskResult], seconds: float) -> dict[str, Json]:
        """All environments together, and each of them under ``envs``."""
        samples = self.config.evaluate.samples
        by_name = {runner.name: [result for result in results if result[0] is runner] for runner in self.runners}
        return {
            "step": step,
            "time": time.time(),
            "seconds": seconds,
            "env": "+".join(by_name),
            "samples": samples,
            "temperature": self.sampling.temperature,
            **(_numbers(results, samples) if results else {}),
            "envs": {name: _numbers(some, samples) for name, some in by_name.items()},
            "rollouts": [_shown(result) for some in by_name.values() for result in some[: _SHOWN // len(by_name)]],
        }


def held_out(config: RunConfig, tasks: Tasks) -> Tasks:
    """The tasks that are evaluated; a sequence of a user's own may take no slices."""
    return {name: [some[i] for i in range(min(config.evaluate.tasks, len(some)))] for name, some in tasks.items()}


def _numbers(results: Sequence[TaskResult], samples: int) -> dict[str, Json]:
    """mean@k and pass@k over tasks, with 95 % intervals; a failed answer counts as wrong.

    ``solved`` has the right answers of each task in order, so that runs can be compared task by task.
    """
    solved = [sum(map(runner.solved, group.rollouts)) for runner, group in results]
    means = [right / samples for right in solved]
    ks = sorted({1, *(k for k in (2, 4, 8, 16, 32, 64) if k < samples), samples})
    passed = {k: [pass_at(right, samples, k) for right in solved] for k in ks}
    every = [r for _, group in results for r in group.rollouts]
    answered = [r for r in every if r.num_tokens]
    return {
        "tasks": len(results),
        "solved": solved,
        "mean": math.fsum(means) / len(means),
        "mean_ci": list(interval(means)),
        "pass_at": {str(k): math.fsum(values) / len(values) for k, values in passed.items()},
        "pass_ci": list(interval(passed[ks[-1]])),
        "truncated": sum(r.truncated for r in answered) / max(1, len(answered)),
        "tokens": sum(r.num_tokens for r in answered) / max(1, len(answered)),
        "failed": sum(r.status == "error" for r in every),
    }


def _shown(result: TaskResult) -> dict[str, Json]:
    """A task and its first answer."""
    runner, group = result
    first = group.rollouts[0]
    return {
        "task": f"{runner.label}{first.task.id}",
        "prompt": first.task.prompt[-1].content,
        "answer": first.task.answer,
        "text": first.text,
        "reward": first.reward,
        "truncated": first.truncated,
        "error": first.error,
    }
