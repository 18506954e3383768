"""What a publish tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.metrics import Max, Sum, Value
from tandem.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one publish did."""

    version: PolicyVersion
    """What the policy is now, and what the engine serves if it was published."""
    moved: bool = True
    """False if this step was not published: the engine goes on with an older one."""
    seconds: float = 0.0
    """From pause to resume, without the optimizer's own time."""
    bytes: int = 0
    """Bytes that were copied; 0 where nothing was."""
    paused: float = 0.0
    """Seconds the engine sampled nothing."""
    probe_gap: float | None = None
    """Largest difference of the probe's logprobs between engine and trainer; None if this publish was not proven."""


@dataclass(slots=True, kw_only=True)
class Handoff:
    """What ``commit`` hands to the block that runs the optimizer."""

    published: Published | None = None
    """Set when the block is left and the publish succeeded."""
    unproven: PolicyVersion | None = None
    """What the policy holds, before it is proven that engines do."""
    _still: bool = False
    _asks: list[Callable[[], None]] = field(default_factory=list)

    def when_still(self, ask: Callable[[], None]) -> None:
        """Call ``ask`` once nothing is sampled by older weights any more: what it asks waits for the new ones."""
        self._asks.append(ask)
        if self._still:
            self.stands_still()

    def stands_still(self) -> None:
        """For who runs the publish: so it is. Again does nothing."""
        self._still = True
        asks, self._asks = self._asks, []
        for ask in asks:
            ask()

    def metrics(self) -> Mapping[str, Value]:
        """Numbers of this publish."""
        if self.published is None or not self.published.moved:
            return {}
        p = self.published
        out: dict[str, Value] = {"seconds/sync": Sum(p.seconds), "engine/paused_seconds": Sum(p.paused)}
        if p.probe_gap is not None:
            out["probe_gap"] = Max(p.probe_gap)
        return out
