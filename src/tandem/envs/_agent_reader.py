"""An agent's function in the interpreter that has its packages, as the process of a package plays it."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from typing import Any


class Solver:
    """An agent, which is given each task with the attributes of ``tandem.Task``."""

    def __init__(self, agent: str) -> None:
        self.solve = pkgutil.resolve_name(agent)

    def ready(self) -> None:
        """It was imported."""

    async def play(self, task: dict[str, Any], url: str) -> Any:
        """Solve a task with the policy at a URL."""
        prompt = tuple(SimpleNamespace(**message) for message in task["prompt"])
        return await self.solve(SimpleNamespace(**{**task, "prompt": prompt}), url)


load = Solver
