"""Three turns: the environment answers each guess, and rewards every turn by itself."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        state["guesses"] = state.get("guesses", 0) + 1
        return [{"role": "user", "content": f"No. Guess {state['guesses'] + 1}?"}]

    async def add_trajectory_step(self, state: vf.State, trajectory_step: vf.TrajectoryStep) -> None:
        trajectory_step["reward"] = float(len(state["trajectory"]))
        await super().add_trajectory_step(state, trajectory_step)


def load_environment() -> vf.Environment:
    train = [{"question": f"Guess a number below {n}.", "answer": str(n // 2)} for n in range(10, 20)]
    test = [{"question": f"Guess a number below {n}.", "answer": str(n // 2)} for n in range(20, 23)]

    def spoken(completion: list[vf.Message]) -> float:
        return sum(len(str(message["content"])) for message in completion if message["role"] == "assistant") / 10

    return Guess(
        dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(test),
        rubric=vf.Rubric(funcs=[spoken]),
        max_turns=3,
    )
