"""Reward functions of examples/brevity.yaml: plain functions, found by their import path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.types import Rollout


def right(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """TRL's signature: all replies to one prompt, and the task's columns by name."""
    replies = [completion[0]["content"] for completion in completions]
    return [float(gold in reply.split()) for gold, reply in zip(answer, replies, strict=True)]


def brief(rollout: Rollout) -> float:
    """Or one rollout at a time: 1 for a single word, less for each further one."""
    return 1.0 / max(1, len(rollout.text.split()))
