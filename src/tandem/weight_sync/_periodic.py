"""Ways that need not publish every step."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.weight_sync.base import WeightSync


@dataclass(frozen=True, kw_only=True)
class Periodic(WeightSync):
    """A way whose publishes cost enough that some steps may do without; the last one never does."""

    every: int = 1
    """Steps between two publishes; there is one after the last step too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise ValueError("every must be at least 1")

    @property
    def behind(self) -> int:
        """Steps by which the engine's weights may be older than the policy."""
        return self.every - 1
