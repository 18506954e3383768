"""Rewards that a random model gets some of. They are graded in a worker process."""

from __future__ import annotations

from typing import Any


def near(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """How near the first character is to the gold digit; 0 if it is no digit."""
    first_characters = [completion[0]["content"][:1] for completion in completions]
    return [
        1.0 - abs(int(first) - int(gold)) / 9 if first and first in "0123456789" else 0.0
        for first, gold in zip(first_characters, answer, strict=True)
    ]


def digit(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Whether the first character is a digit, right or wrong."""
    return [float(completion[0]["content"][:1] in set("0123456789")) for completion in completions]


def letters(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Share of the text's characters that are letters: siblings of a random model nearly always differ in it."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in texts]
