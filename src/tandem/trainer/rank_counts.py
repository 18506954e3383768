"""How many ranks a memory plan is for."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tandem.config.loading import RunConfig
from tandem.config.sections import Distributed
from tandem.distributed.placement import Placement, visible_accelerators
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """How many ranks a plan is for."""

    world: int = 1
    """Those of the run, over which states are divided."""
    local: int = 1
    """Those of this host, which share its memory."""

    @classmethod
    def of(cls, config: RunConfig) -> RankCounts:
        """Those that a launcher has started, or that the recipe has the trainer start.

        Raises:
            ConfigError: they disagree, or ``distributed`` divides the work of one process.
        """
        if (placement := Placement.from_environment(os.environ)) is not None:
            placement.check_ranks(config.ranks)
            return cls(world=placement.world_size, local=placement.local_world_size)
        if config.ranks is None and config.distributed != Distributed():
            alone = "ranks is not set and no launcher started several processes"
            raise ConfigError(f"distributed changes nothing: {alone}; set ranks, or remove distributed")
        world = max(1, len(visible_accelerators(os.environ))) if config.ranks == "auto" else config.ranks or 1
        return cls(world=world, local=world)
