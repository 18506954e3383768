"""Who trains and who samples: ``gpus`` divided between ranks and engines by the memory plan, and drawn for a person.

And what several ranks, or processes that share a model, cannot do: refused by the option's name before weights load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from tandem.config.loading import RunConfig
from tandem.distributed.placement import Placement
from tandem.engines.base import ReportsChecksums
from tandem.errors import ConfigError, DoesNotFit, TandemError, UnsupportedPair
from tandem.machine import readable
from tandem.model import packing
from tandem.model.context import CONTEXT_PARALLEL, check_heads
from tandem.model.penalties import Penalties
from tandem.model.policy import load_config
from tandem.optimizers.base import UpdatesParts
from tandem.trainer import memory_plan, pairs

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
    check_config(config)
    check_model_heads(config, model)
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


def check_config(config: RunConfig) -> None:
    """Refuse what the recipe alone tells cannot be: ``--show``, ``tandem check`` and a run have this one list.

    Raises:
        UnsupportedPair: names the options, and what can be done.
        ConfigError: this machine lacks what an option needs.
    """
    pairs.check_pairs(config)
    check_ranks(config, pairs.RankCounts.of(config).world)


def check_ranks(config: RunConfig, world: int, placement: Placement | None = None) -> None:
    """Refuse what several ranks cannot do, on whatever machine; with ``placement``, on these hosts.

    Raises:
        UnsupportedPair: names the option, and what can be done.
    """
    divided, shared = config.distributed, config.distributed.context_parallel
    if world % shared:
        why = f"{shared} ranks cannot share each sequence where there are {world}; set ranks to a multiple of it"
        raise UnsupportedPair(f"distributed.context_parallel: {why}")
    if world == 1:
        return
    sharded, replicas = divided.shard == "weights", divided.replicas
    cuts_trained = sharded and config.trainable.folder_name == "model"  # an adapter is whole on each rank
    cuts_published = config.trainable.payload == "weights"
    options, moves = config.optimizer, config.moves_reference
    precision, gradients = getattr(options, "precision", "masters"), getattr(options, "gradients", "float32")
    whole, on_host = not isinstance(options, UpdatesParts), options.states_on == "host"
    refused = {
        f"distributed.replicas: {replicas} without distributed.shard: weights; leave it out": not sharded
        and replicas > 1,
        f"distributed.replicas: {replicas}: as many ranks have each replica; set it to 1 or {_divisors(world)}": (
            world % replicas > 0
        ),
        "optimizer: it updates whole tensors; choose adamw, adamw8bit or adamw_cpu": whole,
        "optimizer.gradients: bfloat16: ranks sum gradients in float32; leave it out": gradients != "float32",
        "distributed.shard: weights and a reference that moves; choose reference: start, or shard: states": (
            sharded and moves and cuts_published
        ),
        "distributed.shard: weights and this optimizer; choose adamw or adamw8bit": cuts_trained and on_host,
        "distributed.shard: weights and optimizer.precision; leave it out": cuts_trained and precision != "masters",
        "distributed.shard: weights and matmul: fp8; leave matmul out": sharded and config.matmul == "fp8",
        "distributed.context_parallel and penalties of sampling; set those to their defaults": (
            shared > 1 and Penalties.of(config.sampling, []) is not None
        ),
    }
    refused |= _refused_engines(config, placement)
    if pairs.has_slices(config):
        refused |= _refused_slices(config, world, placement)
    for why, is_refused in refused.items():
        if is_refused:
            raise UnsupportedPair(f"ranks: {world} cannot go with {why}")


def check_gpus(config: RunConfig, counts: pairs.RankCounts) -> None:
    """Refuse more ranks of this host, and engines apart from them, than it has GPUs.

    Raises:
        UnsupportedPair: says how many there are, and what would do.
    """
    local, gpus = counts.local, torch.cuda.device_count() if torch.cuda.is_available() else None
    if counts.world == 1 or gpus is None:
        return
    if gpus < local:
        raise UnsupportedPair(f"ranks: {local} of this machine need as many GPUs, and it has {gpus}; lower ranks")
    engine: Any = config.engine
    if not pairs.has_engines_apart(config) or engine.urls or engine.devices:
        return
    needed = local + engine.replicas * engine.tensor_parallel_size
    if gpus < needed:
        instead = "lower ranks or engine.replicas, or choose sync: shared"
        raise UnsupportedPair(f"ranks: {local} and the engines need {needed} GPUs, and it has {gpus}; {instead}")


def _refused_engines(config: RunConfig, placement: Placement | None) -> dict[str, bool]:
    engine: Any = config.engine
    if pairs.has_engines_apart(config):
        idle = bool(engine.sleep) and not engine.devices
        return {f"engine.sleep: {engine.sleep}: engines are on other GPUs than the ranks; leave it out": idle}
    if not pairs.has_engines_beside(config):
        return {}
    several, open_to_all = placement is not None and placement.has_several_hosts, not engine.require_api_key
    return {
        "engine.urls and sync: shared; leave urls out, or choose sync: broadcast": bool(engine.urls),
        "engine.replicas or engine.devices and sync: shared, which has an engine for each rank on its GPU; leave both "
        "out, or choose sync: broadcast": engine.replicas > 1 or bool(engine.devices),
        "engine.require_api_key: false on several hosts, where anyone could overwrite weights; leave it out": (
            several and open_to_all and not engine.api_key_variable
        ),
    }


def _refused_slices(config: RunConfig, world: int, placement: Placement | None) -> dict[str, bool]:
    """What cannot be where each rank writes the slices of one engine's worker."""
    workers, local = pairs.ranks_of_engine(config), world if placement is None else placement.local_world_size
    shards, replicas = pairs.shards_of(config, world), config.distributed.replicas
    size = "engine.tensor_parallel_size"
    return {
        f"distributed.shard: weights and {size}: {workers}: each rank writes the slices of one worker; set {size} to "
        f"1 or {_divisors(world)}, or choose shard: states": world % workers > 0,
        f"distributed.shard: weights, an adapter and {size}: {workers}: each rank writes all of it into an engine; set "
        f"{size} to 1, or choose sync: broadcast or hotswap": workers > 1 and config.trainable.payload == "adapter",
        f"distributed.replicas: {replicas} and {size}: {workers}: each replica is cut among {shards} ranks; set {size} "
        f"to {_divisors(shards)}, or distributed.replicas to fewer": shards % workers > 0,
        f"{size}: {workers} on a host that has {local} of them: an engine is within one host; set {size} to "
        f"{_divisors(local)}, or choose distributed.shard: states": local % workers > 0,
    }


def check_model_heads(config: RunConfig, model_config: Any) -> None:
    """Refuse ranks of a sequence, or an engine's tensor-parallel workers, that cannot share the model's heads.

    A model whose configuration gives no one number of heads is not judged: its engine refuses it itself.

    Args:
        config: the recipe.
        model_config: transformers' configuration of its model.

    Raises:
        ConfigError: names the option and the numbers that would do.
    """
    if config.distributed.context_parallel > 1 and packing.chosen(model_config, config.packing).packing != "tree":
        raise ConfigError(f"{CONTEXT_PARALLEL}: {model_config.model_type} is not packed as a tree; set it to 1")
    text = model_config.get_text_config()
    query_heads = getattr(text, "num_attention_heads", None)
    if not isinstance(query_heads, int):
        return
    key_heads = getattr(text, "num_key_value_heads", None) or query_heads
    check_heads(query_heads, key_heads, config.distributed.context_parallel, option=CONTEXT_PARALLEL)
    workers = getattr(config.engine, "tensor_parallel_size", 1)
    check_heads(query_heads, key_heads, workers, option="engine.tensor_parallel_size")


def check_routers(config: RunConfig, model_config: Any) -> None:
    """Refuse ``router_replay`` of a model whose experts cannot be chosen, or are not told.

    And ``router_aux_loss_coef`` of one without that loss.

    Raises:
        ConfigError: says why, and what would do.
    """
    if config.router_aux_loss_coef:
        if config.distributed.context_parallel > 1:
            raise ConfigError("router_aux_loss_coef is of whole sequences; set distributed.context_parallel: 1")
        packing.check_balance(model_config)
    if not config.router_replay:
        return
    packing.check_replay(model_config)
    plainly = packing.chosen(model_config, config.packing).packing != "tree"
    if plainly and ReportsChecksums not in config.engine.capabilities:
        raise ConfigError("router_replay: the embedded engine needs packing: tree; choose engine: vllm")


def _divisors(number: int) -> str:
    """Numbers above 1 that divide one, in words."""
    return " or ".join(str(each) for each in range(2, number + 1) if number % each == 0) or "a number that divides it"
