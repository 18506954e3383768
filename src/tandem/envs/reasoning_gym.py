"""Every procedural task of the reasoning-gym library, through one adapter."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.envs._gym import GymTasks
from tandem.errors import ConfigError
from tandem.types import Json


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(GymTasks):
    """A task of reasoning-gym, such as chain_sum, letter_counting or mini_sudoku."""

    task: str
    """Its name in reasoning-gym."""
    config: dict[str, Json] = field(default_factory=dict)
    """Its options, such as {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1} of chain_sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seed", "size"):
            if name in self.config:
                raise ConfigError(f"config must not set {name}: it is an option of the environment itself")

    @property
    def gym(self) -> tuple[str, dict[str, Json]]:
        return self.task, self.config
