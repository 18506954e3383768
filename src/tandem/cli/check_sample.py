"""``tandem check --sample N``: plays the groups that a run would begin with, and counts those with a gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tandem.api.blocking import run_to_end
from tandem.cli._graders_log import graders_log
from tandem.config.loading import RunConfig, load
from tandem.errors import ConfigError
from tandem.types import Group

if TYPE_CHECKING:
    from tandem.trainer.forecast import Forecast

LITTLE = 0.25
"""Share of groups with signal below which most sampling is for nothing."""


def check_sample(recipe: Path, overrides: Sequence[str], count: int) -> None:
    """Play and print; few groups with signal are a matter of judgement, and no error.

    Raises:
        ConfigError: the recipe has no tasks of its own, or is wrong.
    """
    config = load(recipe, overrides).config
    if config.broker is not None:
        raise ConfigError(f"{recipe} trains on a broker's groups, and --sample plays none of those; leave it out")
    from tandem.observability.progress import shown

    with graders_log() as log:
        with shown():
            forecast = run_to_end(_played(config, count, log))
        for line in lines(forecast, config):
            typer.echo(line)


async def _played(config: RunConfig, count: int, log: Path) -> Forecast:
    from tandem.trainer import assemble as run  # only now: it loads torch
    from tandem.trainer import environments
    from tandem.trainer.forecast import forecast

    async with run.playing(config, environments.tasks(config, "train"), None, log) as runners:
        return await forecast(config, runners, count)


def lines(forecast: Forecast, config: RunConfig) -> Iterator[str]:
    """The result in words."""
    from tandem.observability.board import answer_lines
    from tandem.observability.completions import shortened, shown
    from tandem.observability.dropped import change, why

    groups, signal = forecast.groups, forecast.signal
    without = [
        ("zero_variance" if len(group.scored) > 1 else "failed", group) for group in groups if group.zero_variance
    ]
    tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
    yield f"played {len(groups)} groups of {config.group_size} answers in {forecast.seconds:.0f} s, {tokens:,} tokens"
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
