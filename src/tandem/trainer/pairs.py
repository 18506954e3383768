"""How a recipe's parts go together: what is refused before anything is loaded, how many ranks, which GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.loading import RunConfig
from tandem.config.sections import Distributed
from tandem.distributed.placement import Placement, visible_accelerators
from tandem.engines.base import EngineSpec, ExportsWeights, ReportsChecksums
from tandem.errors import ConfigError, UnsupportedPair
from tandem.lazy import torch
from tandem.weight_sync.base import WeightSync


def check_pairs(config: RunConfig) -> None:
    """Refuse parts that cannot work together, or not on this machine.

    Raises:
        UnsupportedPair: names the ones that can.
        ConfigError: this machine lacks what an option needs.
    """
    if config.compile is True:
        from tandem.model import compilation  # which needs torch, as 8-bit products do

        compilation.decide(True, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if config.matmul == "fp8":
        from tandem.model import float8

        float8.check()
    if config.sampling.regex and not getattr(config.engine, "has_grammars", False):
        raise UnsupportedPair("sampling.regex: vLLM alone has grammars; choose engine: vllm, or reward the form")
    if config.sampling.regex and config.old_logprobs != "recomputed":
        raise UnsupportedPair("sampling.regex: logprobs are those within the grammar; set old_logprobs to recomputed")
    if config.router_replay and (config.broker or not config.engine.tells_experts):
        what = "rollouts of a broker" if config.broker else "this engine's answers"
        raise UnsupportedPair(f"router_replay: {what} do not tell experts; set it to false, or choose engine: vllm")
    rank, most = getattr(config.trainable, "rank", 0), config.engine.most_rank
    if config.trainable.payload == "adapter" and most is not None:
        if rank > most:
            raise UnsupportedPair(f"trainable.rank: vLLM has room for ranks up to {most}, not {rank}")
        for option in ("target_parameters", "modules_to_save"):
            if getattr(config.trainable, option, ()):
                raise UnsupportedPair(f"trainable.{option}: vLLM adapts linear layers alone; set merged to true")
    saved = getattr(config.trainable, "modules_to_save", None)
    if saved and config.trainable.folds and config.distributed.shard == "weights":
        raise UnsupportedPair("trainable.modules_to_save, merged: weights are cut; set distributed.shard to states")
    _sync(config).check(trainable=config.trainable, engine=config.engine)
    _check_lag(config)


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


def has_engines_beside(config: RunConfig) -> bool:
    """True if each rank shares its weights with an engine in a process of its own, on the rank's device."""
    return ReportsChecksums in config.engine.capabilities and config.sync.capability is ExportsWeights


def has_engines_apart(config: RunConfig) -> bool:
    """True if engines hold weights of their own, which the lead publishes to them."""
    return ReportsChecksums in config.engine.capabilities and config.sync.capability is not ExportsWeights


def is_cut(config: RunConfig) -> bool:
    """Whether weights are cut and no rank has all of them; an engine in the lead's process would need them whole."""
    sharded = config.distributed.shard == "weights" and config.ranks != 1
    return sharded and ReportsChecksums in config.engine.capabilities


def has_slices(config: RunConfig) -> bool:
    """Whether ranks whose weights are cut write the slices of engines beside them."""
    return is_cut(config) and has_engines_beside(config)


def ranks_of_engine(config: RunConfig) -> int:
    """How many neighbouring ranks share one engine, each its worker on the rank's device; 1 where each has its own."""
    return int(getattr(config.engine, "tensor_parallel_size", 1)) if has_slices(config) else 1


def shards_of(config: RunConfig, world: int) -> int:
    """Among how many of so many ranks states are divided, and weights too where they are cut: those of a replica."""
    return max(1, world // config.distributed.replicas) if config.distributed.shard == "weights" else world


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
    indices = range(local_rank, local_rank + ranks)
    return ",".join(visible[index] if index < len(visible) else str(index) for index in indices)


def _sync(config: RunConfig) -> WeightSync:
    """The way that the recipe's weights reach its engine."""
    if not has_slices(config):
        return config.sync
    from tandem.trainer.ranks.slices import SharedSlices  # which needs torch

    return SharedSlices.of(config.sync)


def _check_lag(config: RunConfig) -> None:
    """Refuse a lag that cannot be, with this engine and way of syncing.

    Raises:
        UnsupportedPair: says what can.
    """
    behind = config.sync.behind
    if config.max_lag < behind:
        instead = f"set max_lag to {behind} at least, or sync.every to {config.max_lag + 1} at most"
        raise UnsupportedPair(f"sync.every: {behind + 1} leaves the engine {behind} steps behind the policy; {instead}")
    if config.max_lag and getattr(config.engine, "sleep", 0):
        raise UnsupportedPair("engine.sleep samples nothing while a step is trained; set max_lag to 0, or leave it out")
    if config.broker is not None and (saved := config.checkpoint.save) != "all":
        raise UnsupportedPair(f"checkpoint: {saved} with a broker, which would serve groups again; set it to all")
