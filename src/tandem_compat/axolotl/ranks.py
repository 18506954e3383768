"""How many ranks an Axolotl file is for, and what they share: its keys of FSDP, DeepSpeed and parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tandem.distributed.placement import visible_accelerators
from tandem.errors import ConfigError
from tandem_compat.axolotl.recipe import AxolotlRecipe
from tandem_compat.schedules import OPTIMIZERS
from tandem_compat.sharding import Sharding, of_accelerate, of_deepspeed, of_fsdp, shard_of, started_ranks

_SIZES = ("dp_shard_size", "dp_replicate_size")


def read_ranks(recipe: AxolotlRecipe, environ: Mapping[str, str]) -> None:
    """Set the ranks and what they share; a batch of the file is one rank's, or that of all that share a sequence.

    Args:
        recipe: what the file comes to so far.
        environ: the launcher's variables, or else CUDA_VISIBLE_DEVICES, say how many ranks there are.
    """
    key, sharding = _sharding(recipe, environ)
    recipe.sharding = sharding or Sharding(shard="states")
    for note in recipe.sharding.notes:
        recipe.nothing(key, note)
    if recipe.sharding.checkpointing and recipe["gradient_checkpointing"] is None:
        recipe.put("checkpointing", "full", key)
    if recipe.serving:
        return
    # As accelerate, which axolotl train starts: a rank on each GPU that is named, or in a file that shards on all.
    recipe.ranks = _ranks(recipe, environ, each=sharding is not None or "CUDA_VISIBLE_DEVICES" in environ)
    group = max(recipe["dp_shard_size"], recipe.sharding.group)
    workers = recipe.engine_gpus if "vllm.tensor_parallel_size" in recipe else group
    shard = shard_of(
        recipe,
        recipe.sharding,
        recipe.ranks,
        full=not recipe["adapter"],
        moving_reference=bool(recipe["trl.beta"] and recipe["trl.sync_ref_model"]),
        optimizer=OPTIMIZERS.get(recipe["optimizer"], ""),
        fp8=recipe["fp8"],
        workers=workers if recipe["trl.use_vllm"] and recipe["trl.vllm_mode"] == "colocate" else 0,
    )
    recipe.sharding = replace(recipe.sharding, shard=shard)
    shared = _context_parallel(recipe)
    recipe.batches = max(1, recipe.ranks // shared)
    if recipe.ranks > 1:
        named = [option for option in (*_SIZES, key) if option in recipe]
        recipe.put("ranks", recipe.ranks, *named)
        recipe.put("distributed.shard", recipe.sharding.shard, *named[-1:])
        each = f"every {shared} of them together" if shared > 1 else "each"
        recipe.note("ranks", f"{recipe.ranks}; a step has micro_batch_size x gradient_accumulation_steps of {each}")
    elif sharding is not None:
        recipe.note(key, "with one rank there is nothing to divide; a launcher such as torchrun starts several")


def read_replicas(recipe: AxolotlRecipe) -> None:
    """Set how many replicas of divided weights there are; of divided states there is one, of all ranks."""
    group, option = max(recipe["dp_shard_size"], recipe.sharding.group), "dp_replicate_size"
    replicas: int = recipe[option]
    if replicas == 1 and group > 1 and recipe.ranks % group == 0:
        replicas, option = recipe.ranks // group, "dp_shard_size"
    if replicas == 1 or recipe.serving:
        return
    workers = recipe.engine_gpus if recipe["trl.vllm_mode"] == "colocate" else 1
    if recipe.sharding.shard == "states":
        recipe.note(option, "states are divided among all ranks, of which each then keeps less")
    elif recipe.ranks // replicas % workers:
        recipe.note(option, f"weights are divided among all ranks: each engine is of {workers}")
    else:
        recipe.put("distributed.replicas", replicas, option)


def _context_parallel(recipe: AxolotlRecipe) -> int:
    """Ranks that share a sequence, and so a batch."""
    for option in ("context_parallel_size", "sequence_parallel_degree"):
        size: int = recipe[option]
        if size > 1:
            recipe.put("distributed.context_parallel", size, option)
            return size
    return 1


def _sharding(recipe: AxolotlRecipe, environ: Mapping[str, str]) -> tuple[str, Sharding | None]:
    """What is sharded, and the option that says so."""
    config, words = recipe["fsdp_config"], recipe["fsdp"]
    fsdp = "fsdp_config" if config else "fsdp"
    if recipe["deepspeed"]:
        return "deepspeed", of_deepspeed(recipe["deepspeed"], partial(recipe.wrong, "deepspeed"))
    if config or words or recipe["fsdp_version"] is not None:
        listed = list(map(str, words)) if isinstance(words, list) else str(words).split()
        return fsdp, of_fsdp(config, listed, partial(recipe.wrong, fsdp))
    return "ranks", of_accelerate(environ, partial(recipe.wrong, "the launcher's file"))


def _ranks(recipe: AxolotlRecipe, environ: Mapping[str, str], *, each: bool) -> int:
    """Ranks that a launcher started, that the file wants, or one for ``each`` accelerator."""
    try:
        started = started_ranks(environ)
    except ConfigError as error:
        recipe.problems.add("launcher", str(error))
        return 1
    wanted = 1
    for option in _SIZES:
        wanted *= recipe[option]
    if started is not None and wanted not in (1, started):
        recipe.wrong("dp_shard_size", f"the launcher started {started} ranks, and the file is for {wanted}")
    if started is not None or wanted > 1:
        return started or wanted
    return max(1, len(visible_accelerators(environ))) if each else 1
