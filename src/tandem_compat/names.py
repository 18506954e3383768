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
_VERL: Mapping[str, str] = {
    "data.train_files": "env: dataset, with path",
    "data.val_files": "env: dataset, with test_path",
    "data.prompt_key": "env: dataset, with prompt",
    "data.train_batch_size": "groups_per_step: prompts of a step; of several updates max_lag, their number less 1",
    "data.max_prompt_length": "nothing: no prompt is cut; context bounds prompt and answer together",
    "data.max_response_length": "sampling.max_tokens",
    "data.seed": "seed",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.lora_rank": "trainable: lora, with rank",
    "actor_rollout_ref.model.lora_alpha": "trainable.alpha, of trainable: lora",
    "actor_rollout_ref.model.target_modules": "trainable.target_modules, of trainable: lora",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "checkpointing: full or none",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optimizer.warmup_steps",
    "actor_rollout_ref.actor.grad_clip": "optimizer.max_grad_norm",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "groups_per_step: prompts of one update",
    "actor_rollout_ref.actor.ppo_epochs": "updates_per_batch",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "micro_batch_tokens; memory, not results",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "micro_batch_tokens; memory, not results",
    "actor_rollout_ref.actor.clip_ratio": "loss.clip_low and loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "loss.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": (
        "loss.reduction: token-mean token, seq-mean-token-mean sequence, seq-mean-token-sum-norm constant"
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": "loss: vanilla grpo, gspo gspo, cispo cispo, sapo sapo",
    "actor_rollout_ref.actor.use_kl_loss": "reference: start",
    "actor_rollout_ref.actor.kl_loss_coef": "reference.beta",
    "actor_rollout_ref.actor.kl_loss_type": "reference.estimator: kl k1, mse k2, low_var_kl k3",
    "actor_rollout_ref.actor.entropy_coeff": "nothing: no loss here has a term of the entropy",
    "actor_rollout_ref.rollout.name": "engine: vllm or embedded",
    "actor_rollout_ref.rollout.n": "group_size",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "sampling.top_p",
    "actor_rollout_ref.rollout.top_k": "sampling.top_k; -1 is 0",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "engine.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.tensor_parallel_size",
    "actor_rollout_ref.rollout.max_model_len": "engine.max_model_len",
    "actor_rollout_ref.rollout.max_num_seqs": "engine.max_num_seqs",
    "actor_rollout_ref.rollout.enforce_eager": "engine.enforce_eager",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluate.samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluate.temperature",
    "algorithm.adv_estimator": "advantage: grpo grpo, rloo rloo",
    "algorithm.norm_adv_by_std_in_grpo": "advantage: true grpo, false dr_grpo",
    "algorithm.use_kl_in_reward": "reference: start, whose KL is a term of the loss, not of the reward",
    "algorithm.filter_groups.enable": "zero_variance_groups: drop or keep",
    "algorithm.filter_groups.max_num_gen_batches": "max_resample_times",
    "data.gen_batch_size": "oversample: auto, or this / train_batch_size",
    "custom_reward_function.path": "rewards: functions by import path, pkg.module:name",
    "custom_reward_function.name": "rewards: functions by import path, pkg.module:name",
    "trainer.total_training_steps": "steps",
    "trainer.total_epochs": "steps: rows x epochs / groups_per_step",
    "trainer.save_freq": "checkpoint.every",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.test_freq": "evaluate.every",
    "trainer.val_before_train": "evaluate.before",
    "trainer.logger": "loggers: console, wandb, tensorboard or trackio",
    "trainer.project_name": "loggers: wandb, with project",
    "trainer.experiment_name": "name",
    "trainer.default_local_dir": "runs",
    "trainer.resume_mode": "nothing: a run is resumed by its folder, tandem train RUN",
}


_PRIME_RL = {
    "orchestrator.oversampling_factor": "oversample: auto, or this factor",
    "orchestrator.buffer.online_difficulty_filtering": "zero_variance_groups: drop or keep",
    "orchestrator.max_async_level": "max_lag",
}


def meant(option: str) -> str | None:
    """Hint for another system's option, such as ``from TRL? here it is group_size (docs/guide/trl.md)``.

    Args:
        option: a name, or a dotted path of verl's or Axolotl's.

    Returns:
        None for a name that none of them has.
    """
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
        ("verl", _VERL),
        ("prime-rl", _PRIME_RL),
        ("TRL or ms-swift", swift),
        ("Axolotl", axolotl),
    )


def _meaning(option: ForeignOption) -> str:
    """What a dialect's table says of one, without the default that it has there."""
    return option.becomes.partition("; default")[0] or f"nothing: {option.idle or option.refused}"
