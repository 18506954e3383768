"""Options of a rollout buffer, as the recipe gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.algorithms.curricula.base import Curriculum
from tandem.config.sections import Replay, Reroll
from tandem.rollout.oversampling import Oversample
from tandem.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOptions:
    """The recipe's options of a rollout buffer."""

    groups_per_step: int
    """Groups in a batch."""
    group_size: int
    """Siblings in a group."""
    max_lag: int
    """Most optimizer steps between the weights that sampled a token and those it trains."""
    behind: int = 0
    """How many of these steps the engine's weights may themselves be old when they sample."""
    drop_zero_variance: bool
    """Replace groups whose rewards are all equal."""
    oversample: Oversample = "off"
    """How many groups are admitted for the places of a batch."""
    on_policy_tail: Literal["wait", "abort"] = "wait"
    """What becomes of answers that are still sampled when a batch is full on-policy."""
    sampling: Sampling
    """How answers are sampled."""
    max_dropped_batches: int = 50
    """Batches' worth of an environment's groups dropped in a row before it is left out, or the run ends if no other is
    left."""
    steps: int = 0
    max_resample_times: int | None = None
    """Batches' worth of zero-variance groups that are replaced for one batch; then they are kept. None: as many as it
    takes."""
    replay: Replay = field(default_factory=Replay)
    """What may take the place of zero-variance groups."""
    reroll: Reroll = field(default_factory=Reroll)
    """When unsolved tasks come again."""
    curriculum: Curriculum | None = None
    """How often each task is drawn; None: once in every epoch."""

    @property
    def ahead(self) -> int:
        """Steps by which sampling may be ahead of training."""
        return self.max_lag - self.behind
