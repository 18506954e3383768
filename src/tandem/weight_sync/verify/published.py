"""What a publish tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
class Commit:
    """What a commit hands to the block that runs the optimizer."""

    published: Published | None = None
    """Set when the block is left and the publish succeeded."""
    unverified: PolicyVersion | None = None
    """What the policy holds, before it is verified that engines do."""
    release: Callable[[], None] | None = None
    """Frees the slots of the batch that is trained; None where who commits does that later."""

    def accept_requests(self) -> None:
        """What is requested from now on is served by the new weights: release the batch. Again does nothing."""
        release, self.release = self.release, None
        if release is not None:
            release()

    def succeeded(self) -> Published:
        """What the publish did.

        Raises:
            RuntimeError: the block was not left yet, or it failed.
        """
        if self.published is None:
            raise RuntimeError("the commit has published nothing yet; ask after its block was left")
        return self.published

    def metrics(self) -> Mapping[str, Value]:
        """Numbers of this publish."""
        if self.published is None or not self.published.moved:
            return {}
        p = self.published
        out: dict[str, Value] = {"seconds/sync": Sum(p.seconds), "engine/paused_seconds": Sum(p.paused)}
        if p.probe_gap is not None:
            out["probe_gap"] = Max(p.probe_gap)
        return out
