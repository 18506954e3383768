"""An environment of gymnasium in texts: name things with many vowels."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text

THINGS = ("a bird", "a fruit", "a city", "a colour", "a tree")


class Vowels(gymnasium.Env[str, str]):
    """Two turns, each rewarded by its share of vowels."""

    observation_space = action_space = Text(max_length=10_000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 2
        return f"Name {THINGS[self.np_random.integers(len(THINGS))]}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        share = sum(letter in "aeiou" for letter in action.lower()) / max(1, len(action))
        return "Another one.", share, not self.left, False, {}


gymnasium.register("Vowels-v0", entry_point=Vowels)
