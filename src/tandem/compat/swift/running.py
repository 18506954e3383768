"""How ms-swift's steps are run: what is trained by which optimizer, and what is saved, evaluated and shown."""

from __future__ import annotations

import math
from pathlib import Path

from tandem.compat.table import Reader
from tandem.types import Json

COMPLETIONS = "tandem.compat.swift.completions:CompletionsFile"
"""The logger that writes completions.jsonl."""

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit", "adafactor": "adafactor",
}  # fmt: skip
"""By ms-swift's names."""
SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine",
}  # fmt: skip
"""By ms-swift's names."""


def per_step(given: Reader, updates: float) -> int:
    """Steps that are so many optimizer updates."""
    return max(1, math.ceil(updates / int(given["num_iterations"])))


def _every(given: Reader, name: str, steps: int) -> int:
    """Steps from one time to the next of what an argument asks for: so many updates, or below 1 a share of the run."""
    strategy = given[f"{name.removesuffix('_steps')}_strategy"]
    if strategy == "epoch":
        return max(1, math.ceil(steps / max(1.0, float(given["num_train_epochs"]))))
    asked = float(given[name])
    if asked > 1 and asked != int(asked):
        given.wrong(name, f"it is a whole number of steps, or a share of all of them below 1, not {asked:g}")
    return per_step(given, asked) if asked >= 1 else math.ceil(asked * steps)


def optimizer(given: Reader, steps: int) -> Json:
    """``optimizer`` of a run of so many steps."""
    kind = OPTIMIZERS[given["optim"]]
    if given["offload_optimizer"]:
        if kind != "adamw":
            given.wrong("offload_optimizer", f"it is of adamw, not of {given['optim']}")
        kind = "adamw_cpu"
    usual = 1e-4 if given["train_type"] == "lora" else 1e-5
    rate = given["learning_rate"] if given["learning_rate"] is not None else usual
    schedule = SCHEDULES[given["lr_scheduler_type"]]
    warmup = _warmup(given, steps)
    adam = {"beta1": given["adam_beta1"], "beta2": given["adam_beta2"], "eps": given["adam_epsilon"]}
    found: dict[str, Json] = {"kind": kind, "lr": rate, "schedule": schedule}
    found |= {"warmup_steps": warmup} if warmup else {}
    for name, value in (given["lr_scheduler_kwargs"] or {}).items():
        if name not in ("min_lr", "min_lr_rate") or schedule == "constant":
            given.wrong("lr_scheduler_kwargs", f"{name} is unknown to {given['lr_scheduler_type']}")
        found["min_lr_ratio"] = value / rate if name == "min_lr" else value
    found |= {"max_grad_norm": given["max_grad_norm"], "weight_decay": given["weight_decay"]}
    if kind == "adafactor":
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if name in given:
                given.note(name, "changes nothing with --optim adafactor")
        return found
    return found | adam


def _warmup(given: Reader, steps: int) -> int:
    """Steps in which the learning rate rises."""
    if given["lr_scheduler_type"] == "constant":
        for name in ("warmup_steps", "warmup_ratio"):
            if given[name]:
                why = "changes nothing with --lr_scheduler_type constant, which has no warm-up in ms-swift, too"
                given.note(name, f"{why} (constant_with_warmup has)")
        return 0
    updates, share = int(given["warmup_steps"]), float(given["warmup_ratio"])
    return math.ceil(updates / int(given["num_iterations"])) or math.ceil(share * steps)


def trained(given: Reader, mode: str) -> dict[str, Json]:
    """``trainable``; beside an engine of its own an adapter's sum travels, unless the engine takes adapters."""
    if given["train_type"] != "lora":
        return {"kind": "full"}
    modules = given["target_modules"]
    return {
        "kind": "lora",
        "rank": given["lora_rank"],
        "alpha": given["lora_alpha"],
        "target_modules": "all-linear" if modules == ["all-linear"] else modules,
        **({"merged": True} if mode != "none" and not given["vllm_enable_lora"] else {}),
    }


def evaluated(given: Reader, steps: int) -> Json:
    """``evaluate`` of a run of so many steps: nothing without held-out rows."""
    strategy = given.only("eval_strategy", {"steps": "steps", "epoch": "epoch", "no": "no"})
    if strategy == "no" or not (given["split_dataset_ratio"] or given["val_dataset"]):
        return {"tasks": 0}
    by_steps = "eval_steps" if "eval_steps" in given or strategy == "epoch" else "save_steps"
    every = _every(given, by_steps, steps)
    samples = given["num_generations_eval"] or given["num_generations"]
    greedy = {"temperature": given["temperature"], "top_p": given["top_p"]}
    return {"every": every, "samples": samples, **greedy, "before": False}


def checkpoint(given: Reader, steps: int) -> Json:
    """``checkpoint`` of a run of so many steps."""
    if given.only("save_strategy", {"steps": "steps", "epoch": "epoch", "no": "no"}) == "no":
        return {"every": steps, "keep": 1}
    every = min(steps, _every(given, "save_steps", steps))
    return {"every": every, "keep": given["save_total_limit"] or math.ceil(steps / every)}


def loggers(given: Reader) -> list[Json]:
    """``loggers``: the terminal, boards, and completions.jsonl."""
    boards = [name for name in given["report_to"] if name not in ("none", "swanlab")]
    if "swanlab" in given["report_to"]:
        given.note("report_to", "there is no logger for swanlab; numbers are in metrics.jsonl of the run's folder")
    for name in boards:
        if name not in ("tensorboard", "wandb", "trackio"):
            given.wrong("report_to", f"there is no {name!r} here; choose from tensorboard, wandb, trackio, none")
    return ["console", *boards, *([{"kind": COMPLETIONS}] if given["log_completions"] else [])]


def folder(given: Reader) -> dict[str, Json]:
    """Where the run's folder is."""
    path = Path(given["output_dir"] or Path("output") / Path(given["model"]).name)
    if given["add_version"]:
        return {"runs": str(path), **({"name": given["run_name"]} if given["run_name"] else {})}
    if given["run_name"]:
        given.wrong("run_name", "with --add_version false the run's folder is output_dir; leave it out")
    return {"runs": str(path.parent), "name": path.name}
