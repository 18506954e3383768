"""Tandem's names for options of TRL, verl, ms-swift and Axolotl, for the error when a recipe uses one of theirs.

The tables of the dialects that are read whole know most of the names; here are those that none of them has.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tandem_compat.axolotl.options import TOP, TRL, VLLM
from tandem_compat.swift.options import RLHF
from tandem_compat.table import ForeignOption

_TRL: Mapping[str, str] = {
    "model_name_or_path": "model",
    "beta": "reference: {kind: start, beta: ...}, none for 0",
    "vllm_mode": "engine: vllm, started by the run (colocate) or at engine.urls (server)",
    "vllm_max_model_len": "engine.max_model_len, or context for both engine and trainer",
    "dataset": "env: dataset, with path",
    "datasets": "env: dataset, with path; of several envs",
    "rl": "nothing: GRPO is what Tandem trains by",
    "trl": "nothing: its options have names of a recipe; a whole file of Axolotl has base_model, and no model",
    "vllm": "engine: vllm, and its options",
    "external_plugins": "rewards: functions by import path",
    "plugin": "rewards: functions by import path",
    "custom_register_path": "rewards: functions by import path",
    "columns": "env: dataset, with prompt and answer",
    "use_data_producer": "max_lag",
    "bf16": "dtype: bfloat16",
    "warmup_ratio": "optimizer.warmup_steps: the ratio times steps, as a whole number",
    "dataset_name": "env: dataset, with path",
    "train_dataset": "env: dataset, with path",
    "eval_dataset": "env: dataset, with test_path or test_split",
    "dataset_train_split": "env: dataset, with train_split",
    "peft_config": "trainable: lora, with rank, alpha and target_modules",
    "use_peft": "trainable: lora",
    "optim": "optimizer.kind: adamw, adamw8bit, adamw_cpu or adafactor",
    "steps_per_generation": "max_lag, its number of steps less 1; sync.every",
    "max_prompt_length": "nothing: no prompt is cut; context bounds prompt and answer together",
    "sapo_temperature_pos": "loss.temperature_positive, of loss: sapo",
    "sapo_temperature_neg": "loss.temperature_negative, of loss: sapo",
    "vllm_max_model_length": "engine.max_model_len, or context for both engine and trainer",
    "vllm_group_port": "nothing: the engine says at which port weights reach it",
    "log_unique_prompts": "nothing: every rollout is in the run's folder",
    "shuffle_dataset": "nothing: tasks are always shuffled, anew in every epoch",
    "max_tool_calling_iterations": "env: an environment of several turns, such as agent",
    "logging_strategy": "nothing: every step is written down",
}
_VERL = ("actor_rollout_ref.", "algorithm.", "custom_reward_function.", "data.", "trainer.")
"""What verl's options begin with."""


def meant(option: str) -> str | None:
    """Hint for another system's option, such as ``from TRL? here it is group_size (docs/guide/trl.md)``.

    Args:
        option: a name, or a dotted path of verl's or Axolotl's.

    Returns:
        None for a name that none of them has.
    """
    if option.startswith(_VERL):
        return "from verl? docs/guide/trl.md says what its options are here"
    for system, table in _tables():
        if option in table:
            left_out = table[option].removeprefix("nothing: ")
            here = f"leave it out: {left_out}" if left_out != table[option] else f"here it is {left_out}"
            page = "axolotl" if system == "Axolotl" else "trl"
            return f"from {system}? {here} (docs/guide/{page}.md)"
    return None


@cache
def _tables() -> tuple[tuple[str, Mapping[str, str]], ...]:
    """System and its names; of two that have a name the first is looked at."""
    groups = {"": TOP, "trl.": TRL, "vllm.": VLLM}
    axolotl = {prefix + name: _meaning(row) for prefix, rows in groups.items() for name, row in rows.items()}
    swift = {name: _meaning(argument) for argument in RLHF for name in (argument.name, *argument.also)}
    return (
        ("TRL", _TRL),
        ("TRL or Axolotl", {name: _meaning(option) for name, option in TRL.items()}),
        ("TRL or ms-swift", swift),
        ("Axolotl", axolotl),
    )


def _meaning(option: ForeignOption) -> str:
    """What a dialect's table says of one, without the default that it has there."""
    return option.becomes.partition("; default")[0] or f"nothing: {option.idle or option.refused}"
