"""Grading for the tasks beside it, which lm-eval loads by their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def math_verify(task: Mapping[str, str], answers: Sequence[str]) -> dict[str, float]:
    """1 where the answer is equal to the gold one."""
    from math_verify import parse, verify

    return {"math_verify": float(verify(parse(f"${task['answer']}$"), parse(answers[0])))}
