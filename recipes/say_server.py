"""A server of OpenEnv: say the word back."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

WORDS = ("cat", "dog", "sun", "sea", "ice", "oak", "fox", "jam")


class SayAction(Action):
    """What is said."""

    message: str


class SayObservation(Observation):
    """What is to be said."""

    prompt: str = ""


class Say(Environment[SayAction, SayObservation, State]):
    """Two turns, each rewarded for the word, less a little for every letter."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.word, self.left = "", 2

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> SayObservation:
        self.word, self.left = WORDS[(seed or 0) % len(WORDS)], 2
        return SayObservation(prompt=f"Say {self.word}.")

    def step(self, action: SayAction, timeout_s: float | None = None, **_: Any) -> SayObservation:
        self.left -= 1
        said = action.message.lower()
        reward = float(self.word in said) - min(len(said), 100) / 1000
        return SayObservation(prompt=f"Again: say {self.word}.", reward=reward, done=not self.left)

    @property
    def state(self) -> State:
        return State(step_count=2 - self.left)


if __name__ == "__main__":
    app = create_app(Say, SayAction, SayObservation, env_name="say", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
