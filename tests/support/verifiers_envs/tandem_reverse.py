"""A single turn: write a word backwards. Groups are scored together where ``together`` says so."""

from __future__ import annotations

import os
import time

import verifiers as vf
from datasets import Dataset

WORDS = ("ab", "cd", "no", "we", "at", "go", "if", "by", "us", "me")


def load_environment(together: bool = False, broken: str = "") -> vf.Environment:
    rows = [{"question": f"Write {word} backwards.", "answer": word[::-1]} for word in WORDS]

    def share_of_vowels(completion: list[vf.Message]) -> float:
        text = str(completion[-1]["content"])
        if broken == "dies":
            os.kill(os.getpid(), 9)
        while broken == "floods":
            os.write(1, b"x" * (1 << 20))
        if broken == "hangs":
            time.sleep(3600)
        return sum(letter in "aeiou" for letter in text) / max(1, len(text))

    def length(completion: list[vf.Message]) -> float:
        return float(len(str(completion[-1]["content"])))

    def rank(completions: list[list[vf.Message]]) -> list[float]:
        lengths = [len(str(completion[-1]["content"])) for completion in completions]
        return [float(sum(other < mine for other in lengths)) for mine in lengths]

    rubric = vf.Rubric(funcs=[share_of_vowels, length], weights=[2.0, 0.25])
    if together:
        rubric.add_reward_func(rank, weight=10.0)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
