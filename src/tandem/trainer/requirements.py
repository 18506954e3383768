"""What a run requires of its engine, and whether the engine started on the policy's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.config.loading import RunConfig
from tandem.engines.base import Engine, EngineRequirements, ReportsChecksums
from tandem.model import packing
from tandem.model.policy import load_config
from tandem.trainer.pairs import has_engines_beside, ranks_of_engine


def engine_requirements(config: RunConfig, folder: Path | None, *, restored: int = 0) -> EngineRequirements:
    """Requirements of the run for its engine, which after ``restored`` steps starts on the checkpoint's own weights."""
    saved = folder / "checkpoints" / f"{restored:06d}" / config.trainable.folder_name if folder and restored else None
    return EngineRequirements(
        model=config.model,
        dtype=config.dtype,
        folder=folder,
        weights=saved if config.trainable.folder_name == "model" else None,
        payload=config.trainable.payload,
        rank=getattr(config.trainable, "rank", 0),
        targets=_adapted(config),
        capability=config.sync.capability,
        versions=config.max_lag + 2,
        answers=-(-config.groups_per_step * config.group_size // _engines(config)),
        seed=config.seed,
        router_replay=config.router_replay,
    )


def _engines(config: RunConfig) -> int:
    """Engines that share a step's answers."""
    if has_engines_beside(config) and isinstance(config.ranks, int):
        return max(1, config.ranks // ranks_of_engine(config))
    return len(getattr(config.engine, "urls", ())) or int(getattr(config.engine, "replicas", 1))


def _adapted(config: RunConfig) -> tuple[str, ...]:
    """Names of the layers that an engine in another process must be ready to adapt; no weight is loaded for it."""
    if config.trainable.payload != "adapter" or ReportsChecksums not in config.engine.capabilities:
        return ()
    model = packing.bare(load_config(config.model), dtype=torch.float32, packing=config.packing)
    targets: Callable[[Any], Sequence[str]] = getattr(config.trainable, "targets", lambda _: ())
    return tuple(targets(model))


def started_on_ours(config: RunConfig, engine: Engine, restored: int) -> bool:
    """Whether the engine, as it started, holds the weights that the policy holds (adapters aside)."""
    if engine.started_elsewhere:
        return False
    return not restored or config.trainable.folder_name == "model" or config.trainable.payload == "adapter"
