"""Reward functions that TRL ships and its examples import."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_THOUGHT = re.compile(r"^(?!.*<think>.*<think>).*?</think>.*$", re.DOTALL)


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **columns: Any) -> list[float | None]:
    """1 where the answer equals the solution by math-verify, else 0; None where the solution cannot be read."""
    from math_verify import parse, verify

    golds = [parse(text) for text in solution]
    pairs = zip(golds, map(_text, completions), strict=True)
    return [float(verify(gold, parse(text))) if gold else None for gold, text in pairs]


def reasoning_accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], reasoning_delimiters: Sequence[str] = (), **columns: Any
) -> list[float | None]:
    """``accuracy_reward`` of what follows the reasoning; 0 for an answer that never ends its reasoning."""
    ends, texts = reasoning_delimiters or ("</think>",), map(_text, completions)
    answers = [next((text.split(end)[-1] for end in ends if end in text), None) for text in texts]
    scores = accuracy_reward([answer or "" for answer in answers], solution)
    return [0.0 if answer is None else score for answer, score in zip(answers, scores, strict=True)]


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the answer begins with one thought that ends with ``</think>``, else 0."""
    return [float(bool(_THOUGHT.match(_text(completion)))) for completion in completions]


def _text(completion: Any) -> str:
    return str(completion if isinstance(completion, str) else completion[-1]["content"])
