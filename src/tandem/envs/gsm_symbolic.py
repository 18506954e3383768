"""GSM-Symbolic: word problems from templates with fresh names and numbers, made by reasoning-gym."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.envs._gym import GymTasks
from tandem.types import Json


@dataclass(frozen=True, kw_only=True)
class GsmSymbolic(GymTasks):
    """Grade-school word problems from templates; no download needed."""

    @property
    def gym(self) -> tuple[str, dict[str, Json]]:
        return "gsm_symbolic", {}
