"""Who trains and who samples: ``gpus`` divided between ranks and engines by the memory plan, and drawn for a person."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from tandem.config.loading import RunConfig
from tandem.distributed.placement import Placement
from tandem.errors import ConfigError, DoesNotFit, TandemError
from tandem.machine import readable
from tandem.model.policy import load_config
from tandem.trainer import memory_plan, pairs
from tandem.trainer.ranks import checks

FILLED = 0.9
"""Share of a GPU that an engine fills which has it for itself."""


def placed(config: RunConfig) -> RunConfig:
    """The recipe with its ``gpus`` divided between ranks and engines; as it is where it does not give them.

    Engines apart get half of the GPUs, or fewer where the ranks' plan needs more.

    Raises:
        ConfigError: a launcher has started the ranks, or no division can be.
        DoesNotFit: no division fits.
    """
    if config.gpus is None:
        return config
    if (placement := Placement.from_environment(os.environ)) is not None:
        raise ConfigError(f"gpus: {config.gpus}, but {placement.launcher} has started the ranks; leave gpus out")
    if torch.cuda.is_available() and torch.cuda.device_count() < config.gpus:
        raise ConfigError(f"gpus: {config.gpus}, but this machine has {torch.cuda.device_count()}; lower gpus")
    model = load_config(config.model)
    planner = memory_plan.Planner(replace(config, gpus=None, ranks=1), model)
    # What is free, and the host's memory, which no division changes, are looked at when the run starts.
    planner.machine, planner.beside = replace(planner.machine, free=planner.machine.total), None
    refused: list[TandemError] = []
    for layout in _layouts(config, config.gpus):
        try:
            _require(layout, model, planner)
        except TandemError as error:
            refused.append(error)
        else:
            return layout
    raise refused[0]


def _layouts(config: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """Every division of so many GPUs, the preferred first: weights are cut where whole ones are refused."""
    engine: Any = config.engine
    for shard in dict.fromkeys((config.distributed.shard, "weights") if gpus > 1 else ("states",)):
        whole = replace(config, gpus=None, ranks=gpus, distributed=replace(config.distributed, shard=shard))
        if pairs.has_slices(whole):
            sizes = [size for size in range(2, gpus + 1) if gpus % size == 0 and size >= engine.tensor_parallel_size]
            yield from (replace(whole, engine=replace(engine, tensor_parallel_size=size)) for size in sizes)
        elif not pairs.has_engines_apart(whole) or engine.urls or gpus == 1:
            yield whole
        else:
            yield from _layouts_apart(whole, gpus)


def _layouts_apart(config: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """Divisions into ranks and engines that each have GPUs of their own: small engines first, and many."""
    engine: Any = config.engine
    share = max(FILLED, engine.gpu_memory_utilization)
    for size in range(engine.tensor_parallel_size, gpus):
        for replicas in range(max(1, gpus // 2 // size), 0, -1):
            ranks = gpus - replicas * size
            sized = replace(engine, tensor_parallel_size=size, replicas=replicas, gpu_memory_utilization=share)
            layout = replace(config, ranks=ranks, engine=sized)
            yield replace(layout, engine=replace(sized, devices=pairs.devices_apart(layout, ranks)))


def _require(config: RunConfig, model: Any, planner: memory_plan.Planner) -> None:
    """Refuse a division that cannot be, or does not fit an accelerator.

    Raises:
        TandemError: says why.
    """
    checks.check_config(config)
    checks.check_model_heads(config, model)
    if planner.machine.is_host:
        return
    planner.ranks = pairs.RankCounts.of(config)
    planner.plan(config).require()
    weights, total = planner.engine_weights(config), planner.machine.total
    if pairs.has_engines_apart(config) and weights > total // 2:
        taken = f"an engine's weights take {readable(weights)} of each GPU's {readable(total)}"
        raise DoesNotFit(f"{taken}: too little is left for keys and values; raise engine.tensor_parallel_size")


def described(config: RunConfig) -> str:
    """What ``gpus`` came to, in words."""
    engine: Any = config.engine
    engines = (
        f"; engines: {engine.replicas} × {engine.tensor_parallel_size} GPU" if pairs.has_engines_apart(config) else ""
    )
    return f"gpus: {config.ranks} ranks, distributed.shard: {config.distributed.shard}{engines}"


def drawn(planner: memory_plan.Planner, config: RunConfig) -> str:
    """Which GPU holds what at the peak of the plan: one line for all that hold the same."""
    machine, local = planner.machine, planner.ranks.local
    (started, near), weights = planner.engines(config), planner.engine_weights(config)
    share = planner.share(config) if started else 0.0
    cache = int(share * machine.total) - weights if share else int(1e9 * getattr(config.engine, "kv_cache_gb", 0))
    sampling = {"engine's weights": weights, "keys and values": cache}
    training = {line.name: line.bytes for line in planner.plan(config).at_peak()}
    if filled := training.pop("engine", 0):  # what is filled by share has the weights in it
        there = near * weights if share else 0
        holder = "weights" if pairs.has_engines_beside(config) else "engine's weights"
        training |= {"keys and values": filled - there, holder: there}
    if machine.is_host:
        processes = [*(f"rank {rank}" for rank in range(local)), *(f"engine {n}" for n in range(started))]
        return f"  {machine.name}  {', '.join(processes)}: {_sizes(training, machine.total)}"
    spec: Any = pairs.engines_of(config, planner.ranks.world, local) if planner.ranks.world > 1 else config.engine
    gpus: dict[str, tuple[list[str], dict[str, int]]] = {}
    for rank in range(local):
        gpus.setdefault(pairs.engine_devices(rank, 1), ([], training))[0].append(f"rank {rank}")
    for number, names in enumerate(getattr(spec, "devices", ())):
        for name in names.split(","):
            gpus.setdefault(name, ([], sampling))[0].append(f"engine {number}")
    rows = []
    for sizes, group in groupby(gpus.items(), key=lambda gpu: _sizes(gpu[1][1], machine.total)):
        names, who = zip(*((name, " and ".join(holders)) for name, (holders, _) in group), strict=True)
        rows.append(f"  GPU {', '.join(names)}  {', '.join(who)}: {sizes}")
    return "\n".join(rows)


def _sizes(parts: dict[str, int], total: int) -> str:
    """Sizes of what a GPU holds, the largest first, and their sum."""
    sizes = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sizes if size >= 5e7)
    return f"{listed} = {sum(parts.values()) / 1e9:.1f} of {total / 1e9:.1f} GB"
