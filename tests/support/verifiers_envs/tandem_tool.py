"""A tool: ``double``, which verifiers itself calls as often as the policy asks for it."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def double(number: int) -> str:
    """Double a number.

    Args:
        number: which
    """
    return str(2 * number)


def load_environment() -> vf.Environment:
    rows = [{"question": f"Double {n}.", "answer": str(2 * n)} for n in range(10)]

    def messages(completion: list[vf.Message]) -> float:
        return float(len(completion))

    def characters(completion: list[vf.Message]) -> float:
        return float(len(str(completion[0]["content"])))

    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[double],
        rubric=vf.Rubric(funcs=[messages, characters], weights=[1.0, 0.1]),
        max_turns=3,
    )
