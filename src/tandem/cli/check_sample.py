"""``tandem check --sample N``: plays the groups that a run would begin with, and counts those with a gradient."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from tandem.api.blocking import run_to_end
from tandem.cli.check import graders_log
from tandem.config.loading import RunConfig
from tandem.errors import ConfigError
from tandem.observability import progress
from tandem.observability.answers import change, shortened, shown, why
from tandem.observability.board import answer_lines
from tandem.rollout.mixture import MixtureSchedule
from tandem.rollout.source import Draw
from tandem.rollout.task_sampler import EnvRunner
from tandem.trainer import assemble, environments
from tandem.types import Group

LITTLE = 0.25
"""Share of groups with signal below which most sampling is for nothing."""


def check_sample(config: RunConfig, count: int) -> None:
    """Play and print; few groups with signal are a matter of judgement, and no error.

    Raises:
        ConfigError: the recipe has no tasks of its own.
    """
    if config.broker is not None:
        raise ConfigError("the recipe trains on a broker's groups, and --sample plays none of those; leave it out")
    with graders_log() as log:
        with progress.shown():
            groups, seconds = run_to_end(_played(config, count, log))
        for line in lines(groups, seconds, config):
            typer.echo(line)


async def _played(config: RunConfig, count: int, log: Path) -> tuple[list[Group], float]:
    """The first ``count`` groups of a run, with the model as it is loaded, and the seconds that playing them took."""
    async with assemble.playing(config, environments.tasks(config, "train"), None, log) as runners:
        begun = time.monotonic()
        groups = await _first_groups(config, runners, count)
        return groups, time.monotonic() - begun


async def _first_groups(config: RunConfig, runners: Sequence[EnvRunner], count: int) -> list[Group]:
    """Groups in the order in which a run plays them, a batch's worth at a time."""
    table = MixtureSchedule(runners, config.groups_per_step)
    names = list(itertools.islice(itertools.chain.from_iterable(map(table.batch, itertools.count())), count))
    by_name = {runner.name: runner for runner in runners}
    room, postprocess_rewards = asyncio.Semaphore(config.groups_per_step), environments.postprocess(config)
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

        return await asyncio.gather(*(play(index, name) for index, name in enumerate(names)))


def lines(groups: Sequence[Group], seconds: float, config: RunConfig) -> Iterator[str]:
    """The result in words."""
    signal = [group for group in groups if not group.zero_variance]
    without = [
        ("zero_variance" if len(group.scored) > 1 else "failed", group) for group in groups if group.zero_variance
    ]
    tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
    yield f"played {len(groups)} groups of {config.group_size} answers in {seconds:.0f} s, {tokens:,} tokens"
    share = len(signal) / len(groups)
    commonest = Counter(why(reason, group) for reason, group in without).most_common(4)
    rest = "".join(f"; {count} {'with ' * reason.startswith('every')}{reason}" for reason, count in commonest)
    yield f"  signal: {len(signal)} of {len(groups)} groups ({share:.0%}) have different rewards{rest}"
    yield from _answers(groups)
    failed = [rollout.error.partition("\n")[0] for group in groups for rollout in group.rollouts if rollout.error]
    for error, count in Counter(failed).most_common(1):
        yield f"  {len(failed)} answers failed and have no reward; {count} of them: {shortened(error)}"
    if share < LITTLE:
        yield f"  change: {change(without, config.sampling.max_tokens)}"
    for group in (signal or groups)[:1]:
        best = max(group.rollouts, key=lambda rollout: -math.inf if rollout.reward is None else rollout.reward)
        yield from answer_lines(shown(best), "  the best answer of a group")


def _answers(groups: Sequence[Group]) -> Iterator[str]:
    """What answers earn and how many are cut."""
    scored = [rollout for group in groups for rollout in group.scored]
    if scored:
        mean = math.fsum(rollout.reward or 0.0 for rollout in scored) / len(scored)
        cut = sum(rollout.truncated for rollout in scored) / len(scored)
        yield f"  reward {mean:.3g} on average; {cut:.0%} of the answers are cut at a length limit"
