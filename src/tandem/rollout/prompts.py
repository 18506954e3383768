"""Prompts against the context, before anything is played."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import ConfigError
from tandem.rollout.chat import Template
from tandem.types import Task

FIRST = 64
"""Tasks whose prompts are measured before a run: enough to see that the context is too small for the data."""


def longest(tasks: Sequence[Task], template: Template, context: int) -> int:
    """Tokens of the longest prompt.

    Raises:
        ConfigError: it leaves no room for an answer.
        EnvError: the chat template refuses a prompt.
    """
    lengths = [len(template.prompt(task.prompt)) for task in tasks]
    most = max(lengths)
    if most >= context:
        raise ConfigError(
            f"the prompt of task {tasks[lengths.index(most)].id} has {most} tokens and the context is {context}, so "
            "no room is left for an answer; raise context if the model allows, shorten prompts, or choose another model"
        )
    return most


def shortfall(prompt_tokens: int, context: int, max_tokens: int) -> str:
    """What is said where the context cuts answers before ``sampling.max_tokens`` does; empty where it does not."""
    room = context - prompt_tokens
    if room >= max_tokens:
        return ""
    return f"leaves {room} for answers, fewer than sampling.max_tokens ({max_tokens}): longer answers are cut there"
