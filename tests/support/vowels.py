"""A reward that differs between the answers of a model that was never trained."""

from __future__ import annotations

from tandem.types import Rollout


def share(rollout: Rollout) -> float:
    """Share of the bytes that are vowels in all that the policy said."""
    text = "".join(message.content for message in rollout.messages if message.role == "assistant").lower()
    return sum(letter in "aeiou" for letter in text) / max(1, len(text)) + len(text) / 1000
