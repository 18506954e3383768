"""Sums that a small model can learn, with two worked examples in the prompt."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.Environment:
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    shown: list[vf.Message] = []
    for question, answer in (("2 + 2 =", "4"), ("5 + 3 =", "8")):
        shown += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def right(completion: list[vf.Message], answer: str) -> float:
        words = str(completion[-1]["content"]).replace(".", " ").split()
        return float(bool(words) and words[-1] == answer)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), few_shot=shown, rubric=vf.Rubric(funcs=[right]))
