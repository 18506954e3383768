"""Optimizers, learning-rate schedules, checkpoints and loggers by transformers' names, with their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tandem.types import Json

if TYPE_CHECKING:
    from tandem_compat.table import Reader

OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw8bit"),
    "adafactor": "adafactor",
}
"""What each is here."""
SCHEDULES: Mapping[str, str] = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine", "warmup_stable_decay": "warmup_stable_decay",
}  # fmt: skip
"""What each is here."""

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("min_lr", "min_lr_rate"),
    "linear": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio"),
}


def put_optimizer(reader: Reader, optim: str, scheduler: str, lr: float | None, offload: str = "") -> None:
    """Set an optimizer's kind and its schedule.

    Args:
        reader: what the options of the other system come to.
        optim: the option that names the optimizer.
        scheduler: the option that names the schedule; ``lr_scheduler_kwargs`` has its arguments.
        lr: the learning rate, of which ``min_lr`` is a share.
        offload: the option that keeps the optimizer's states on the host; empty: none does.
    """
    kind = OPTIMIZERS[reader[optim]]
    if offload and kind != "adamw":
        reader.wrong(optim, f"states are on the host with adamw alone, not with {reader[optim]}; leave {offload} out")
    reader.put("optimizer.kind", "adamw_cpu" if offload else kind, optim)
    schedule, kwargs = SCHEDULES[reader[scheduler]], reader["lr_scheduler_kwargs"] or {}
    reader.put("optimizer.schedule", schedule, scheduler)
    known = _ARGUMENTS.get(schedule, ())
    wrong: list[str] = []
    ratio = "optimizer.min_lr_ratio"
    for name, value in kwargs.items():
        if name not in known:
            wrong.append(f"{name} is unknown to this schedule; it has {', '.join(known) or 'no arguments'}")
        elif name == "decay_type":
            reader.put("optimizer.decay", value, "lr_scheduler_kwargs")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            wrong.append(f"{name} is a number, not {value!r}")
        elif name == "num_decay_steps":
            reader.put("optimizer.decay_steps", reader.per_step(value), "lr_scheduler_kwargs")
        elif name != "min_lr" or lr:
            reader.put(ratio, value / lr if name == "min_lr" and lr else value, "lr_scheduler_kwargs")
    if "min_lr" in kwargs and "min_lr_rate" in kwargs:
        wrong.append("give min_lr or min_lr_rate, not both")
    if schedule == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        wrong.append("warmup_stable_decay needs num_decay_steps")
    if reader[scheduler].endswith("_with_min_lr") and not {"min_lr", "min_lr_rate"} & set(kwargs):
        wrong.append(f"{reader[scheduler]} needs min_lr or min_lr_rate")
    for why in wrong:
        reader.wrong("lr_scheduler_kwargs" if kwargs else scheduler, why)


def put_warmup(reader: Reader, steps: int) -> None:
    """Set the steps of warm-up as transformers counts them: warmup_steps go before warmup_ratio."""
    by_ratio = math.ceil(reader["warmup_ratio"] * steps)
    warmup = reader.interval("warmup_steps", steps) if reader["warmup_steps"] else by_ratio
    if warmup and reader["lr_scheduler_type"] != "constant":
        reader.put("optimizer.warmup_steps", warmup)


def every(reader: Reader, option: str, strategy: str, steps: int) -> int:
    """Steps from one time to the next of what happens after each epoch, or as often as an option says."""
    if strategy == "epoch":
        return max(1, math.ceil(steps / max(1.0, float(reader["num_train_epochs"]))))
    return reader.interval(option, steps)


def put_saves(reader: Reader, steps: int) -> None:
    """Set which checkpoints there are, by save_strategy, save_steps and save_total_limit."""
    strategy = reader["save_strategy"]
    period = steps if strategy == "no" else min(steps, every(reader, "save_steps", strategy, steps))
    reader.put("checkpoint.every", period)
    reader.put("checkpoint.keep", 1 if strategy == "no" else reader["save_total_limit"] or math.ceil(steps / period))


def put_loggers(
    reader: Reader, boards: Mapping[str, Mapping[str, Json]], *options: str, files: Sequence[Json] = ()
) -> None:
    """Set loggers: the terminal, boards with those of their options that are set, and files; boards get TRL's names."""
    parts: list[Json] = []
    for kind, every_option in boards.items():
        chosen = {name: value for name, value in every_option.items() if value}
        parts.append({"kind": kind, **chosen} if chosen else kind)
    if parts or files:
        reader.put("loggers", ["console", *parts, *files], *options)
    if parts:
        reader.put("metric_names", "trl", *options)
