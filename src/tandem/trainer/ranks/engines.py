"""Engines beside ranks: how many there are, and on which GPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tandem.config.loading import RunConfig
from tandem.distributed.placement import visible_accelerators
from tandem.engines.base import EngineSpec, ReportsChecksums
from tandem.trainer.live import rank_device
from tandem.trainer.pairs import ranks_of_engine


def engines_of(config: RunConfig, world: int) -> EngineSpec:
    """The recipe's engine; where it is in a process of its own, one beside each rank or group of ranks."""
    engine: Any = config.engine
    if ReportsChecksums not in engine.capabilities:
        return config.engine
    each = ranks_of_engine(config)
    devices = tuple(engine_devices(first, each) for first in range(0, world, each)) if torch.cuda.is_available() else ()
    spec: EngineSpec = replace(engine, replicas=world // each, devices=devices)
    return spec


def engine_devices(local_rank: int, ranks: int) -> str:
    """GPUs of so many ranks, the first of which is given, as CUDA_VISIBLE_DEVICES names them to their engine."""
    visible = visible_accelerators(os.environ)
    indices = [rank_device(rank).index for rank in range(local_rank, local_rank + ranks)]
    return ",".join(visible[index] if index < len(visible) else str(index) for index in indices)
