"""Engines of several ranks: how many there are, and on which GPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tandem.config.loading import RunConfig
from tandem.distributed.placement import visible_accelerators
from tandem.engines.base import EngineSpec
from tandem.trainer.live import rank_device
from tandem.trainer.pairs import has_engines_apart, has_engines_beside, ranks_of_engine


def engines_of(config: RunConfig, world: int, local_ranks: int) -> EngineSpec:
    """The recipe's engine: apart from the ranks of this host, or one beside each rank or group of all ranks."""
    engine: Any = config.engine
    if has_engines_apart(config):
        apart: EngineSpec = replace(engine, devices=devices_apart(config, local_ranks))
        return apart
    if not has_engines_beside(config):
        return config.engine
    each = ranks_of_engine(config)
    devices = tuple(engine_devices(first, each) for first in range(0, world, each)) if torch.cuda.is_available() else ()
    spec: EngineSpec = replace(engine, replicas=world // each, devices=devices)
    return spec


def devices_apart(config: RunConfig, local_ranks: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each engine that is started apart from so many ranks of this host.

    They are the recipe's ``engine.devices``, or else the GPUs after the ranks'.
    """
    engine: Any = config.engine
    if engine.devices or engine.urls or not torch.cuda.is_available():
        return tuple(engine.devices)
    workers = engine.tensor_parallel_size
    return tuple(engine_devices(local_ranks + number * workers, workers) for number in range(engine.replicas))


def engine_devices(local_rank: int, ranks: int) -> str:
    """GPUs of so many ranks, the first of which is given, as CUDA_VISIBLE_DEVICES names them to their engine."""
    visible = visible_accelerators(os.environ)
    indices = [rank_device(rank).index for rank in range(local_rank, local_rank + ranks)]
    return ",".join(visible[index] if index < len(visible) else str(index) for index in indices)
