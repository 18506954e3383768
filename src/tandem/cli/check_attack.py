"""``tandem check --attack``: wrong answers that pay and right ones that do not, before a policy finds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from tandem.api.blocking import run_to_end
from tandem.cli._graders_log import graders_log
from tandem.config.loading import RunConfig, load
from tandem.rollout.attacks import attack

TASKS = 16
"""Tasks whose rewards are attacked, of each environment."""


def check_attack(recipe: Path, overrides: Sequence[str]) -> int:
    """Print what was found; returns 1 if anything was, else 0.

    Raises:
        EnvError: an environment knows no gold reply.
    """
    config = load(recipe, overrides).config
    with graders_log() as log:
        lines = run_to_end(_attacked(config, log))
        typer.echo("\n".join(lines) if lines else "attack: no wrong answer pays, and every right one does")
    return 1 if lines else 0


async def _attacked(config: RunConfig, log: Path) -> list[str]:
    from tandem.trainer import environments

    lines: list[str] = []
    async with environments.opened(config, config.sources, log) as opened:
        for name, graders in opened.graders.items():
            lines += [f"{name}: {line}" for line in await attack(config.sources[name].env, graders, TASKS)]
    return lines
