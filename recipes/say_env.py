"""An environment of verifiers: say the word back, twice, and in fewer letters than your siblings."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ("cat", "dog", "sun", "sea", "ice", "oak", "fox", "jam")


class Say(vf.MultiTurnEnv):
    """Two turns."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return [{"role": "user", "content": f"Again: say {state['answer']}."}]


def said(completion: vf.Messages) -> list[str]:
    """What the policy said in each turn."""
    return [str(message["content"]).lower() for message in completion if message["role"] == "assistant"]


def word(completion: vf.Messages, answer: str) -> float:
    """In how many turns it said the word."""
    return float(sum(answer in text for text in said(completion)))


def brevity(completions: list[vf.Messages]) -> list[float]:
    """How many siblings said more: their group is scored together."""
    letters = [sum(map(len, said(completion))) for completion in completions]
    return [sum(other > mine for other in letters) / len(letters) for mine in letters]


def load_environment() -> vf.Environment:
    """As ``vf.load_environment("say-env")`` finds it."""
    rows = [{"question": f"Say {word}.", "answer": word} for word in WORDS]
    rubric = vf.Rubric(funcs=[word, brevity], weights=[1.0, 0.5])
    system = "Do as you are told, in as few words as you can."
    return Say(dataset=Dataset.from_list(rows), system_prompt=system, rubric=rubric, max_turns=2)
