"""Reward functions of recipes/dataset.yaml: one of each signature that a plain function may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.types import Rollout


def right_city(rollout: Rollout) -> float:
    """1 if the city is named at all. It sees everything about one rollout: task, messages, tokens."""
    return float(rollout.task.answer.casefold() in rollout.text.casefold())


def nothing_else(completions: Sequence[Any], capital: Sequence[str], **columns: Any) -> list[float]:
    """1 if the reply is the city alone. All replies to one prompt at once, and the data's columns by their names."""
    replies = [completion[0]["content"] for completion in completions]
    return [float(reply.strip().rstrip(".") == city) for reply, city in zip(replies, capital, strict=True)]
