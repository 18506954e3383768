"""Measures the policy on held-out tasks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.rollout.measure import Solved, interval, pass_at
from tandem.rollout.worker import Worker
from tandem.telemetry import trace
from tandem.types import Group, Json, Sampling, Task

_SHOWN = 40
"""Answers kept in a record, one of each of the first tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Held-out tasks and when to look at them."""

    worker: Worker
    """Plays and scores."""
    tasks: Sequence[Task]
    """Held-out tasks."""
    samples: int
    """Answers per task."""
    sampling: Sampling
    """How they are sampled; the same random streams at every evaluation."""
    solved: Solved
    """What counts as right."""
    due: Callable[[int], bool]
    """True for steps at which to evaluate."""
    record: Callable[[dict[str, Json]], None]
    """Where results go."""
    started: Callable[[int], None]
    """Told when an evaluation begins."""

    async def maybe(self, step: int) -> None:
        """Evaluate if this step is due."""
        if self.tasks and self.due(step):
            self.started(step)
            self.record(await self(step))

    async def __call__(self, step: int) -> dict[str, Json]:
        """Evaluate now; an ``eval.jsonl`` record."""
        begun = time.time()
        with trace.span("seconds/evaluate"):
            groups = await asyncio.gather(
                *(
                    self.worker.group(task, id=f"{task.id}@eval", index=i, size=self.samples, sampling=self.sampling)
                    for i, task in enumerate(self.tasks)
                )
            )
        return self._summary(step, groups, time.time() - begun)

    def _summary(self, step: int, groups: Sequence[Group], seconds: float) -> dict[str, Json]:
        """mean@k and pass@k over tasks, with 95 % intervals; a failed answer counts as wrong."""
        solved = [sum(map(self.solved, group.rollouts)) for group in groups]
        means = [right / self.samples for right in solved]
        ks = sorted({1, *(k for k in (2, 4, 8, 16, 32, 64) if k < self.samples), self.samples})
        passed = {k: [pass_at(right, self.samples, k) for right in solved] for k in ks}
        every = [r for group in groups for r in group.rollouts]
        answered = [r for r in every if r.num_tokens]
        return {
            "step": step,
            "time": time.time(),
            "seconds": seconds,
            "env": self.worker.env.name,
            "tasks": len(groups),
            "samples": self.samples,
            "temperature": self.sampling.temperature,
            "mean": math.fsum(means) / len(means),
            "mean_ci": list(interval(means)),
            "pass_at": {str(k): math.fsum(values) / len(values) for k, values in passed.items()},
            "pass_ci": list(interval(passed[ks[-1]])),
            "truncated": sum(r.truncated for r in answered) / max(1, len(answered)),
            "tokens": sum(r.num_tokens for r in answered) / max(1, len(answered)),
            "failed": sum(r.status == "error" for r in every),
            "rollouts": [
                {
                    "task": group.rollouts[0].task.id,
                    "prompt": group.rollouts[0].task.prompt[-1].content,
                    "answer": group.rollouts[0].task.answer,
                    "text": group.rollouts[0].text,
                    "reward": group.rollouts[0].reward,
                }
                for group in groups[:_SHOWN]
            ],
        }
