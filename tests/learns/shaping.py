"""A reward that a random model can climb. It is graded in a worker process, so it imports nothing."""

from __future__ import annotations

from typing import Any


def near(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """How near a one-digit answer is to the gold one; a little for each digit of anything else."""
    said = [completion[0]["content"].strip() for completion in completions]
    return [
        1.0 - abs(int(text) - int(gold)) / 9
        if text in set("0123456789")
        else 0.1 * sum(c in "0123456789" for c in text) / max(1, len(text))
        for text, gold in zip(said, answer, strict=True)
    ]
