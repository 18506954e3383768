"""Signal forecast: the first groups of a run, sampled with the model as it is loaded."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.loading import RunConfig
from tandem.observability import progress
from tandem.rollout.data_state import Draw
from tandem.rollout.mixture import MixtureSchedule
from tandem.rollout.task_sampler import EnvRunner
from tandem.trainer.environments import postprocess
from tandem.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Groups sampled with the model as it is loaded."""

    groups: tuple[Group, ...]
    """In the order in which a run plays them."""
    seconds: float
    """How long playing them took."""

    @property
    def signal(self) -> tuple[Group, ...]:
        """Groups with different rewards: what a step can learn from."""
        return tuple(group for group in self.groups if not group.zero_variance)


async def forecast(config: RunConfig, runners: Sequence[EnvRunner], count: int) -> Forecast:
    """Play the first ``count`` groups, a batch's worth at a time."""
    begun, table = time.monotonic(), MixtureSchedule(runners, config.groups_per_step)
    names = list(itertools.islice(itertools.chain.from_iterable(map(table.batch, itertools.count())), count))
    by_name = {runner.name: runner for runner in runners}
    room, postprocess_rewards = asyncio.Semaphore(config.groups_per_step), postprocess(config)
    with progress.under_way("sampling", total=count, unit="groups") as played:

        async def play(index: int, name: str) -> Group:
            runner = by_name[name]
            task, id = runner.of(Draw(env=name, number=names[:index].count(name)))
            async with room:
                group = await runner.group_runner.run(
                    task, id=id, index=index, size=config.group_size, sampling=config.sampling
                )
            played.advance()
            return postprocess_rewards(group)

        groups = await asyncio.gather(*(play(index, name) for index, name in enumerate(names)))
    return Forecast(groups=tuple(groups), seconds=time.monotonic() - begun)
