"""A worker whose answers take a random while, and a trainer that takes batches of what it makes: the buffer alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import msgspec

from tandem.config.loading import RunConfig
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import EngineError
from tandem.rollout.buffer import RolloutBuffer
from tandem.rollout.measure import Solved
from tandem.rollout.source import DataState
from tandem.rollout.task_sampler import EnvRunner
from tandem.types import Completion, Finish, Group, Message, Rollout, Sampling, Task, Turn
from tandem.weight_sync.hotswap import Hotswap

T = TypeVar("T")
Kind = Callable[[Task], str]


def always_good(task: Task) -> str:
    return "ok"


@cache
def tasks(count: int) -> Sequence[Task]:
    return tuple(
        Task(id=f"t{n}", env="fake", prompt=(Message(role="user", content="?"),), answer="") for n in range(count)
    )


def rollout(task: Task, id: str, reward: float | None, versions: tuple[int, ...], finish: Finish = "stop") -> Rollout:
    completion = Completion(
        tokens=(1,) * len(versions), logprobs=(-1.0,) * len(versions), versions=versions, finish=finish
    )
    return Rollout(
        id=id,
        task=task,
        turns=(Turn(prompt=(0,), completion=completion, temperature=1.0),),
        messages=(*task.prompt, Message(role="assistant", content="said")),
        status="error" if reward is None else "ok",
        error="" if reward is not None else f"it broke in {id}",
        rewards={} if reward is None else {"mark": reward},
        reward=reward,
    )


REWARDS: dict[str, tuple[float | None, ...]] = {
    "ok": (0.0, 1.0),
    "zero_variance": (1.0, 1.0),
    "hopeless": (0.0, 0.0),
    "failed": (1.0, None),
    "broken": (None, None),
}


@dataclass
class Trainer:
    """What has been reached, and a worker whose answers take a random while: a ``GroupRunner`` and a version."""

    kind: Kind = always_good
    seed: int = 0
    slowest: int = 12
    step: int = 0
    behind: int = 0
    started: list[str] = field(default_factory=list)
    when: list[tuple[str, int]] = field(default_factory=list)
    playing: set[str] = field(default_factory=set)
    company: list[frozenset[str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    happened: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def run(self, task: Task, *, id: str, index: int, size: int, sampling: Sampling) -> Group:
        self.started.append(id)
        self.when.append((id, self.step))
        self.playing.add(id)
        first = self.served
        try:
            for _ in range(random.Random(f"{self.seed}/{id}/{self.step}").randrange(1, self.slowest)):
                await asyncio.sleep(0)
        finally:
            self.company.append(frozenset(self.playing))
            self.playing.discard(id)
        kind = self.kind(task)
        if kind == "engine":
            raise EngineError("the engine is gone")
        made = [rollout(task, f"{id}/{n}", reward, (first, self.served)) for n, reward in enumerate(REWARDS[kind])]
        return Group(id=id, index=index, env="fake", rollouts=tuple(made))

    @property
    def served(self) -> int:
        """The policy step that is sampled from: it is published every ``behind`` + 1 steps."""
        return self.step - self.step % (self.behind + 1)

    def waves(self) -> dict[str, frozenset[str]]:
        """Who was played together: whoever ends first in a wave has seen all of it."""
        return {id: max((c for c in self.company if id in c), key=len) for id in self.started}

    def runner(self, name: str, count: int, **options: Any) -> EnvRunner:
        return EnvRunner(
            name=name,
            label=options.pop("label", ""),
            seed=options.pop("seed", 7),
            group_runner=self,  # type: ignore[arg-type]
            tasks=tasks(count),
            solved=Solved(reward="mark", full_marks=1.0),
            **options,
        )

    def buffer(
        self,
        count: int = 1000,
        *,
        n: int = 3,
        max_lag: int = 0,
        drop_zero_variance: bool = True,
        patience: int = 50,
        seed: int = 7,
        **reuse: Any,
    ) -> RolloutBuffer:
        return RolloutBuffer(
            runners=[self.runner("fake", count, seed=seed)],
            config=RunConfig(
                model="m",
                env=Arithmetic(),
                groups_per_step=n,
                group_size=2,
                max_lag=max_lag,
                sync=Hotswap(every=self.behind + 1),
                zero_variance_groups="drop" if drop_zero_variance else "keep",
                **{"steps": 100, "oversample": "off", **reuse},
            ),
            max_dropped_batches=patience,
            version=lambda: self.step,
            on_drop=lambda reason, group: self.dropped.append((reason, group.id)),
            on_event=lambda name, fields: self.happened.append((name, dict(fields))),
        )

    async def train(self, buffer: RolloutBuffer, steps: int, slowest: int = 12) -> list[list[Group]]:
        """Optimizer steps as the loop takes them; their batches."""
        delays, batches = random.Random(self.seed), []
        for _ in range(steps):
            batch = await buffer.take()
            for _ in range(delays.randrange(slowest)):
                await asyncio.sleep(0)
            self.step += 1
            for _ in range(delays.randrange(slowest)):
                await asyncio.sleep(0)
            batch.free_slots()
            batches.append(list(batch.groups))
        return batches


def saved(data_state: DataState) -> DataState:
    """The same, as a checkpoint gives it back."""
    plain = json.loads(json.dumps(msgspec.to_builtins(data_state, str_keys=True)))
    return msgspec.convert(plain, DataState, str_keys=True)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


def trained(trainer: Trainer, steps: int, data_state: DataState | None = None, /, **options: Any) -> list[list[Group]]:
    """Batches of a fresh buffer."""

    async def go() -> list[list[Group]]:
        async with trainer.buffer(**options).open(data_state or DataState()) as buffer:
            return await trainer.train(buffer, steps)

    return run(go())


def ids(batches: Sequence[Sequence[Group]]) -> list[str]:
    return [group.id for batch in batches for group in batch]


def mixed(task: Task) -> str:
    """Three in ten groups cannot be trained on; which is a matter of the task alone."""
    return {0: "zero_variance", 3: "zero_variance", 5: "failed"}.get(int(task.id[1:]) % 10, "ok")


@dataclass
class Mixture(Trainer):
    """Two streams of which ``hard`` is mostly flat, in shares of 1 to 2."""

    least: float = 0.0

    def buffer(self, count: int = 1000, **options: Any) -> RolloutBuffer:
        buffer = super().buffer(count, **options)
        easy = self.runner("easy", count, label="easy/", weight=1.0, min_share=self.least)
        return replace(buffer, runners=[easy, self.runner("hard", count, label="hard/", weight=2.0)])

    async def run(self, task: Task, *, id: str, index: int, size: int, sampling: Sampling) -> Group:
        hard = replace(task, id=f"{int(task.id[1:]) % 3}9") if id.startswith("hard/") else replace(task, id="t1")
        named = replace(hard, id=f"t{hard.id.lstrip('t')}")
        group = await super().run(named, id=id, index=index, size=size, sampling=sampling)
        return replace(group, env=id.partition("/")[0])


def makeup(batches: Sequence[Sequence[Group]]) -> list[dict[str, int]]:
    return [dict(Counter(group.env for group in batch)) for batch in batches]
