"""Options of a recipe that say how long a run may stand still and which completions it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import Bounded, bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts(Bounded):
    """Timeouts of a run without progress; then it stops and names the parts that waited. Progress resets them."""

    wait_seconds: float = bounded(3600.0, above=0)
    """Longest that one part may wait for another that has no deadline of its own, without anything coming of it."""
    loop_seconds: float = bounded(300.0, above=0)
    """Longest that one call may hold up everything else in the trainer's process."""
    end_seconds: float = bounded(60.0, above=0)
    """How long a run that is stopped for this may take to end its parts; then its process is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintCompletions(Bounded):
    """Showing what the policy writes: sampled answers with their rewards, in the console and in loggers."""

    every: int = bounded(10)
    """Steps between two times at which answers are shown, the first step among them; 0 never shows any."""
    count: int | None = bounded(1, least=1)
    """Answers shown at a time, drawn from the step's; null: all of them."""

    def due(self, step: int) -> bool:
        """Whether answers of this step are shown."""
        return self.every > 0 and (step == 1 or step % self.every == 0)

    def inert(self) -> Mapping[str, str]:
        """Of none that are shown there is no number."""
        return {} if self.every else {"count": "every is 0, so no answers are shown"}
