"""Completions of the policy, for people: some of each step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tandem.observability.emit import Telemetry
from tandem.observability.options import PrintCompletions
from tandem.types import Group, Json, Rollout

MOST_TEXT = 4000
"""Characters of a prompt or an answer that are shown; of a longer one its beginning and its end."""


def shown(rollout: Rollout) -> dict[str, Json]:
    """An answer as the event ``completions`` and recorded groups have it."""
    return {
        "env": rollout.task.env,
        "task": rollout.task.id,
        "prompt": shortened(rollout.task.prompt[-1].content if rollout.task.prompt else ""),
        "answer": shortened(rollout.task.answer),
        "text": shortened(rollout.text),
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "tokens": rollout.num_tokens,
        "truncated": rollout.truncated,
        "error": shortened(rollout.error),
    }


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """A text of at most about ``most`` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most:,} characters ...] {text[-(most - most // 2) :]}"


class Completions:
    """Sends loggers some of the answers that a step was trained on."""

    def __init__(self, options: PrintCompletions, telemetry: Telemetry) -> None:
        """As ``options`` say, as the event ``completions``."""
        self._options, self._telemetry = options, telemetry

    def __call__(self, step: int, groups: Sequence[Group], advantages: Mapping[str, float]) -> None:
        """A step was trained, with these advantages by rollout id; the same step always shows the same answers."""
        if not self._options.due(step):
            return
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        count = len(rollouts) if self._options.count is None else min(self._options.count, len(rollouts))
        picked = random.Random(step).sample(rollouts, count) if count < len(rollouts) else rollouts
        samples = [shown(rollout) | {"advantage": advantages.get(rollout.id)} for rollout in picked]
        self._telemetry.event("completions", step=step, samples=samples)
