"""Learning-rate schedules by transformers' names, with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.types import Json

SCHEDULES: Mapping[str, str] = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "warmup_stable_decay": "warmup_stable_decay",
}  # fmt: skip
"""What each is here."""

_FIXED: Mapping[str, Json] = {"num_cycles": 0.5, "warmup_type": "linear"}
"""Arguments that can only be what they are by default."""


def arguments(
    schedule: str, kwargs: Mapping[str, Json], lr: float | None, per_step: Callable[[float], int]
) -> tuple[dict[str, Json], list[str]]:
    """Options of an optimizer that a schedule's arguments come to, and what cannot be obeyed of them.

    Args:
        schedule: its name here.
        kwargs: the arguments.
        lr: the learning rate, of which ``min_lr`` is a share.
        per_step: a number of the other system's steps as Tandem's.
    """
    known = {
        "cosine": ("min_lr", "min_lr_rate", "num_cycles"),
        "linear": ("min_lr", "min_lr_rate"),
        "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio", "warmup_type", "num_cycles"),
    }.get(schedule, ())
    options: dict[str, Json] = {}
    wrong: list[str] = []
    for name, value in kwargs.items():
        if name not in known:
            wrong.append(f"{name} is unknown to this schedule; it has {', '.join(known) or 'no arguments'}")
        elif name in _FIXED:
            wrong += [f"{name} must be {_FIXED[name]}, not {value!r}; leave it out"] if value != _FIXED[name] else []
        elif name == "decay_type":
            options["decay"] = value
        elif isinstance(value, bool) or not isinstance(value, int | float):
            wrong.append(f"{name} is a number, not {value!r}")
        elif name == "num_decay_steps":
            options["decay_steps"] = per_step(value)
        elif name != "min_lr":
            options["min_lr_ratio"] = value
        elif lr:
            options["min_lr_ratio"] = value / lr
    if "min_lr" in kwargs and "min_lr_rate" in kwargs:
        wrong.append("give min_lr or min_lr_rate, not both")
    if schedule == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        wrong.append("warmup_stable_decay needs num_decay_steps")
    return options, wrong
