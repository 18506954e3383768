"""DeepSpeed's and FSDP's configurations as what a recipe says of ranks: what is sharded, and where states are.

ZeRO-1, ZeRO-2 and SHARD_GRAD_OP divide gradients and optimizer states: ``distributed.shard: states``. ZeRO-3 and
FULL_SHARD divide the weights too: ``weights``. Whatever else they have changes nothing, since collectives are Tandem's
own and the training's own options say the rest; one note names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tandem.distributed.placement import Placement, counts_hosts, visible_accelerators
from tandem.types import Json
from tandem_compat.table import NO_USE, NOTHING, Reader

Shard = Literal["states", "weights"]

_STRATEGIES: Mapping[str, Shard] = {
    "FULL_SHARD": "weights", "1": "weights", "SHARD_GRAD_OP": "states", "2": "states", "NO_SHARD": "states",
    "3": "states", "HYBRID_SHARD": "weights", "4": "weights", "HYBRID_SHARD_ZERO2": "states", "5": "states",
}  # fmt: skip
_PRESETS: Mapping[str, tuple[int, bool]] = {
    **{f"zero{stage}": (stage, False) for stage in range(4)},
    **{f"zero{stage}_offload": (stage, True) for stage in (2, 3)},
}
"""Stage, and whether states are on the host, by the names that ms-swift has for files of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What a configuration of DeepSpeed or FSDP asks for."""

    shard: Shard
    """What each rank keeps a share of."""
    offload_optimizer: bool = False
    """Whether masters and moments are in host memory."""
    checkpointing: bool = False
    """Whether layers are computed again in the backward pass."""
    group: int = 1
    """Ranks that hold all of what is sharded together, of which others have replicas; 1 where it is not said."""
    notes: tuple[str, ...] = ()
    """Keys that change nothing, and why."""


Refuse = Callable[[str], None]
"""What a mistake is reported to."""


def of_deepspeed(source: Json, refuse: Refuse) -> Sharding | None:
    """What ``deepspeed: zero2.json`` asks for.

    Args:
        source: the path of a file, a name such as zero2 or zero3_offload, or the file's mapping itself.
        refuse: called with every key that is unknown, or that changes results and cannot be had.

    Returns:
        None if the file cannot be read.
    """
    if isinstance(source, str) and source in _PRESETS:
        stage, offload = _PRESETS[source]
        return Sharding(shard="weights" if stage == 3 else "states", offload_optimizer=offload)
    if (options := _mapping(source, refuse)) is None:
        return None
    where = f"{source}: " if isinstance(source, str) and not source.lstrip().startswith("{") else ""
    leaves = dict(_leaves(options))
    stage = leaves.pop("zero_optimization.stage", 0)
    device = leaves.pop("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        refuse(f"{where}zero_optimization.offload_optimizer.device: states are on cpu, or with none on the device")
    if stage not in range(4):
        refuse(f"{where}zero_optimization.stage: there is no stage {stage}; it is from 0 to 3")
    if leaves.pop("fp16.enabled", False) is True:
        refuse(f"{where}fp16.enabled: Tandem trains bfloat16 or float32 weights; leave it out")
    shard: Shard = "weights" if stage == 3 else "states"
    return Sharding(shard=shard, offload_optimizer=device == "cpu", notes=_unread(leaves, where))


def of_fsdp(config: Mapping[str, Json], words: Sequence[str], refuse: Refuse) -> Sharding:
    """What FSDP's options ask for.

    Args:
        config: ``fsdp_config``.
        words: ``fsdp``, such as full_shard and auto_wrap.
        refuse: as for ``of_deepspeed``.
    """
    options = {key.removeprefix("fsdp_"): value for key, value in config.items() if not key.startswith("_")}
    strategy, reshard = options.pop("sharding_strategy", None), options.pop("reshard_after_forward", None)
    checkpointing, offload = options.pop("activation_checkpointing", False), options.pop("offload_params", False)
    for word in words:
        if word not in ("full_shard", "shard_grad_op", "auto_wrap", "offload"):
            refuse(f"{word} is none of full_shard, shard_grad_op, auto_wrap and offload")
    shard: Shard = "states" if "shard_grad_op" in words else "weights"
    if isinstance(reshard, str):  # accelerate's older files have the strategy under this name
        strategy, reshard = reshard, None
    if strategy is not None:
        shard = _STRATEGIES.get(str(strategy).upper(), shard)
        if str(strategy).upper() not in _STRATEGIES:
            choices = ", ".join(name for name in _STRATEGIES if not name.isdigit())
            refuse(f"there is no sharding strategy {strategy}; choose from {choices}")
    if reshard is not None:
        shard = "weights" if reshard else "states"
    return Sharding(
        shard=shard,
        offload_optimizer=bool(offload) or "offload" in words,
        checkpointing=bool(checkpointing),
        notes=_unread(options, ""),
    )


def of_fsdp_file(source: str, refuse: Refuse) -> Sharding | None:
    """What ms-swift's ``--fsdp`` asks for: fsdp2, its own preset, or a file of ``fsdp`` and ``fsdp_config``."""
    if source == "fsdp2":
        return Sharding(shard="weights", checkpointing=True)
    if (options := _mapping(source, refuse, "fsdp2")) is None:
        return None
    for key in options.keys() - {"fsdp", "fsdp_config"}:
        if not key.startswith("_"):
            refuse(f"{source}: {key} is not known; leave it out")
    words = str(options.get("fsdp") or "").split()
    return of_fsdp(options.get("fsdp_config") or {}, words, lambda text: refuse(f"{source}: {text}"))


def shard_of(
    reader: Reader,
    sharding: Sharding,
    ranks: int,
    *,
    full: bool,
    moving_reference: bool = False,
    optimizer: str,
    fp8: bool = False,
    workers: int = 0,
) -> Shard:
    """What ranks keep a share of: their weights where these can be cut, else states; results are the same.

    Args:
        reader: told why weights stay whole.
        sharding: what the other system would divide.
        ranks: how many there are.
        full: every weight is trained.
        moving_reference: there is a reference that follows the policy.
        optimizer: its kind in a recipe, unless its states are on the host.
        fp8: products are in 8 bits.
        workers: those of each engine on the ranks' GPUs; 0: there is none.
    """
    whole = {
        "checkpoints have no parts of a reference that moves": full and moving_reference,
        "8-bit products are of them": fp8,
        "adamw on the device alone follows the cut": full and (optimizer != "adamw" or sharding.offload_optimizer),
        f"each rank writes its whole adapter into an engine, which has {workers} GPUs": not full and workers > 1,
        f"the {workers} GPUs of an engine do not divide {ranks} ranks": workers > 1 and ranks % workers > 0,
    }
    if ranks == 1 or sharding.shard == "states" or not any(whole.values()):
        return sharding.shard
    reason = next(why for why, applies in whole.items() if applies)
    reader.notes.append(f"distributed.shard: states, and each rank has whole weights: {reason}")
    return "states"


def of_accelerate(environ: Mapping[str, str], refuse: Refuse) -> Sharding | None:
    """What ``accelerate launch`` asks for, by the variables that it sets of its file; None where it shards nothing."""
    if environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        if (file := environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")) != "none":
            return of_deepspeed(file, refuse)
        stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        device = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
        zero: Json = {"stage": int(stage) if stage.isdigit() else stage, "offload_optimizer": {"device": device}}
        return of_deepspeed({"zero_optimization": zero}, refuse)
    if environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    truth = {"true": True, "false": False}
    named = {name.lower(): text for name, text in environ.items() if name.startswith("FSDP_")}
    sharding = of_fsdp({name: truth.get(text.lower(), text) for name, text in named.items()}, (), refuse)
    group = environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")
    return replace(sharding, group=max(1, int(group))) if group.isdigit() else sharding


def started_ranks(environ: Mapping[str, str]) -> int | None:
    """Ranks that a launcher started; None where none did, and where a platform has only numbered its hosts.

    Raises:
        ConfigError: the launcher's variables are half set or contradict one another.
    """
    placement = None if counts_hosts(environ) else Placement.from_environment(environ)
    return placement.world_size if placement is not None else None


def wanted_ranks(environ: Mapping[str, str], refuse: Callable[[str, str], None]) -> int:
    """Ranks that a launcher started, or else those that ms-swift's variables ask for: NPROC_PER_NODE on each of NNODES.

    Args:
        environ: a process's environment.
        refuse: called with a variable that is no number, and what it must be.
    """
    if (started := started_ranks(environ)) is not None:
        return started
    ranks = 1
    for name in ("NPROC_PER_NODE", "NNODES"):
        text = environ.get(name, "").strip() or "1"
        if name == "NPROC_PER_NODE" and text in ("gpu", "auto"):
            ranks *= max(1, len(visible_accelerators(environ)))
        elif text.isdigit() and int(text) >= 1:
            ranks *= int(text)
        else:
            refuse(f"{name}={text}, of the environment", "it must be a number of at least 1")
    return ranks


def _mapping(source: Json, refuse: Refuse, presets: str = ", ".join(_PRESETS)) -> Mapping[str, Json] | None:
    """Options from a file or a text of JSON, or as they are."""
    if isinstance(source, Mapping):
        return source
    text = str(source)
    try:
        options = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"{source} cannot be read: {error}; write the path of a JSON file, or one of {presets}")
        return None
    if isinstance(options, Mapping):
        return options
    refuse(f"{source} is no mapping of options")
    return None


def _leaves(options: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Values by dotted key."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _unread(options: Mapping[str, Json], where: str) -> tuple[str, ...]:
    """One note for all keys that are set and not read."""
    names = [name for name, value in options.items() if value not in (None, "auto", "none", *NOTHING)]
    return (f"{where}{', '.join(names)}: {NO_USE}",) if names else ()
