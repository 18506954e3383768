"""Options of an Axolotl file with ``rl: grpo``: what each becomes, why it changes nothing, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Takes = Literal["number", "whole", "truth", "text", "list", "mapping", "anything"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. Of the three texts exactly one is there."""

    becomes: str = ""
    """What it is in a recipe."""
    idle: str = ""
    """Why it changes nothing here, which is told where it is set to something."""
    refused: str = ""
    """Why it is refused where it is set to something."""
    takes: Takes = "anything"
    """What its value must be; null is left out."""
    off: tuple[Any, ...] = ()
    """Values besides null that are as good as leaving it out, where it is idle or refused."""


def _is(becomes: str, takes: Takes) -> Option:
    return Option(becomes=becomes, takes=takes)


def _idle(why: str, *off: Any) -> Option:
    return Option(idle=why, off=off)


def _no(why: str, *off: Any) -> Option:
    return Option(refused=why, off=off)


_ATTENTION = "Tandem has attention of its own"
_SPEED = "it is a matter of speed, and Tandem has kernels of its own"
_ROWS = "rows are read and transformed when a run starts"
_PACKED = "samples are always packed by length, without padding"
_ONE = "the trainer is one process; engines may have GPUs of their own (vllm.tensor_parallel_size)"
_QUANTISED = (
    "Tandem trains bfloat16 or float32 weights, since the engine samples from the very weights that are trained"
)
_LORA = "PEFT's plain LoRA is what engines serve"
_GYM = "NeMo Gym's servers are not asked; play with an environment (env), or grade by a reward function"
_NEMO_GYM = ("enabled", "dir", "auto_start", "head_port", "multi_turn", "verify_timeout", "datasets")
_SCOPE = "Tandem does not have SCOPE-RL"
_ENTROPY = "no loss here has a term of the entropy"
_ADAPTS = "it is read where use_adaptive_entropy is true"
_SERVER = "tandem serve engine is the server"
_TRUSTED = "Tandem runs no code from model repositories"
_MEMORY = "memory is given back as it is freed, not every so many steps"
_COLUMNS = "name the columns in a transform: type: module.function"
_LOADED = "what base_model is, its config.json says"

TOP: Mapping[str, Option] = {
    "base_model": _is("model", "text"),
    "rl": _is("grpo; gdpo is multi_objective_aggregation: normalize_then_sum", "text"),
    "chat_template": _is("chat_template by its name; tokenizer_default leaves it out, jinja reads the next", "text"),
    "chat_template_jinja": _is("chat_template", "text"),
    "adapter": _is("trains: full without it, lora", "text"),
    "lora_r": _is("trains.rank", "whole"),
    "lora_alpha": _is("trains.alpha", "whole"),
    "lora_target_linear": _is("trains.target_modules: all-linear", "truth"),
    "lora_target_modules": _is("trains.target_modules", "anything"),
    "lora_dropout": _idle("Tandem has no dropout: the policy that is scored must be the one that sampled", 0),
    "peft_layers_to_transform": _is("trains.layers, with adapter", "list"),
    "lora_modules_to_save": _no("Tandem trains the adapter alone", []),
    "lora_model_dir": _no("to go on with a run of Tandem's: tandem train RUN"),
    "lora_fan_in_fan_out": _no(_LORA, False),
    "peft_use_dora": _no(_LORA, False),
    "peft_use_rslora": _no("write the lora_alpha that it comes to: lora_alpha x sqrt(lora_r)", False),
    "lora_mlp_kernel": _idle(_SPEED, False),
    "lora_qkv_kernel": _idle(_SPEED, False),
    "lora_o_kernel": _idle(_SPEED, False),
    "load_in_8bit": _no(_QUANTISED, False),
    "load_in_4bit": _no(_QUANTISED, False),
    "datasets": _is("env", "list"),
    "test_datasets": _is("env: held-out rows, for evaluate", "list"),
    "val_set_size": _is("env: the share of rows that is held out, for evaluate", "number"),
    "skip_prepare_dataset": _idle(_ROWS, True, False),
    "dataset_prepared_path": _idle(_ROWS, False),
    "dataset_processes": _idle(_ROWS),
    "dataset_num_proc": _idle(_ROWS),
    "dataloader_num_workers": _idle(_ROWS),
    "dataloader_pin_memory": _idle(_ROWS),
    "dataloader_prefetch_factor": _idle(_ROWS),
    "remove_unused_columns": _no("rewards get every column by name", False),
    "shuffle_merged_datasets": _no("tasks are always shuffled, anew in every epoch", True),
    "sequence_len": _is("micro_batch_tokens, with micro_batch_size; it bounds no prompt and no answer", "whole"),
    "micro_batch_size": _is("groups_per_step, micro_batch_tokens", "whole"),
    "gradient_accumulation_steps": _is("groups_per_step", "whole"),
    "max_steps": _is("steps, divided by num_iterations", "whole"),
    "num_epochs": _is("steps: rows x epochs / groups_per_step, where max_steps is left out", "number"),
    "learning_rate": _is("optimizer.lr", "number"),
    "optimizer": _is("optimizer.kind", "text"),
    "lr_scheduler": _is("optimizer.schedule", "text"),
    "cosine_min_lr_ratio": _is("optimizer.min_lr_ratio", "number"),
    "lr_scheduler_kwargs": _no("of a schedule's options there is cosine_min_lr_ratio alone", {}),
    "warmup_steps": _is("optimizer.warmup_steps, divided by num_iterations", "whole"),
    "warmup_ratio": _is("optimizer.warmup_steps", "number"),
    "weight_decay": _is("optimizer.weight_decay", "number"),
    "adam_beta1": _is("optimizer.beta1", "number"),
    "adam_beta2": _is("optimizer.beta2", "number"),
    "adam_epsilon": _is("optimizer.eps", "number"),
    "max_grad_norm": _is("optimizer.max_grad_norm", "number"),
    "bf16": _is("dtype", "anything"),
    "fp16": _no("Tandem trains bfloat16 or float32; write bf16: true", False),
    "tf32": _idle("products are in the type of the weights", False, "auto"),
    "float32": _is("dtype", "truth"),
    "fp8": _is("matmul: fp8", "truth"),
    "torch_compile": _is("compile", "anything"),
    "gradient_checkpointing": _is("checkpointing: full or none", "anything"),
    "gradient_checkpointing_kwargs": _idle("Tandem's checkpoints need no options", {}, {"use_reentrant": False}),
    "attn_implementation": _idle(_ATTENTION),
    "flash_attention": _idle(_ATTENTION, False),
    "sdp_attention": _idle(_ATTENTION, False),
    "xformers_attention": _idle(_ATTENTION, False),
    "eager_attention": _idle(_ATTENTION, False),
    "flex_attention": _idle(_ATTENTION, False),
    "sample_packing": _idle(_PACKED, False, True),
    "eval_sample_packing": _idle(_PACKED, False, True),
    "pad_to_sequence_len": _idle(_PACKED, False),
    "group_by_length": _idle(_PACKED, False),
    "train_on_inputs": _no("only sampled tokens are trained", False),
    "special_tokens": _is("nothing: a pad token is not needed, others must be the tokenizer's own", "mapping"),
    "tokens": _no("the vocabulary is the model's own", []),
    "model_type": _idle(_LOADED, "AutoModelForCausalLM"),
    "tokenizer_type": _idle(_LOADED, "AutoTokenizer"),
    "tokenizer_config": _is("nothing: it must be base_model", "text"),
    "trust_remote_code": _no(_TRUSTED, False),
    "output_dir": _is("runs, the folder that the run's folder is made in", "text"),
    "logging_steps": _is("print_completions.every, with log_completions; numbers are logged every step", "number"),
    "save_steps": _is("checkpoint.every, divided by num_iterations; below 1 a share of all steps", "number"),
    "save_total_limit": _is("checkpoint.keep", "whole"),
    "save_strategy": _idle("checkpoints are written every save_steps and at the end", "steps"),
    "saves_per_epoch": _is("checkpoint.every: all steps / (saves_per_epoch x num_epochs)", "number"),
    "save_safetensors": _no("checkpoints are safetensors", True),
    "save_only_model": _no("a checkpoint is what a run is resumed from", False),
    "eval_steps": _is("evaluate.every, divided by num_iterations; below 1 a share of all steps", "number"),
    "evals_per_epoch": _is("evaluate.every: all steps / (evals_per_epoch x num_epochs)", "number"),
    "eval_batch_size": _idle("evaluation asks the engine as training does"),
    "eval_strategy": _idle("held-out rows are looked at every eval_steps, before and after", "steps"),
    "seed": _is("seed", "whole"),
    "wandb_project": _is("the wandb sink", "text"),
    "wandb_entity": _is("the wandb sink's entity", "text"),
    "wandb_mode": _is("the wandb sink's mode; disabled leaves it out", "text"),
    "wandb_name": _is("name, the run's folder", "text"),
    "wandb_run_id": _no("a run has an id of its own there, kept in its folder; its name is wandb_name", ""),
    "wandb_watch": _no("it slows training down", "", "false", False),
    "wandb_log_model": _no("checkpoints stay in the run's folder", "", "false", False),
    "use_wandb": _is("the wandb sink", "truth"),
    "use_tensorboard": _is("the tensorboard sink", "truth"),
    "use_trackio": _is("the trackio sink", "truth"),
    "trackio_project_name": _is("the trackio sink's project", "text"),
    "trackio_space_id": _is("the trackio sink's space", "text"),
    "use_mlflow": _no("sinks are console, wandb, tensorboard and trackio", False),
    "use_comet": _no("sinks are console, wandb, tensorboard and trackio", False),
    "hub_model_id": _no("Tandem uploads nothing; tandem export writes the model's folder", ""),
    "resume_from_checkpoint": _no("a run is resumed by its folder: tandem train RUN", "", False),
    "auto_resume_from_checkpoints": _no("a run is resumed by its folder: tandem train RUN", False),
    "early_stopping_patience": _no("a run ends after its steps, or by Ctrl-C", ""),
    "fsdp": _no(_ONE, [], ""),
    "fsdp_config": _no(_ONE, {}),
    "fsdp_version": _idle("there is no fsdp", 1, 2),
    "deepspeed": _no(_ONE, ""),
    "tensor_parallel_size": _no(_ONE, 1),
    "context_parallel_size": _no(_ONE, 1),
    "sequence_parallel_degree": _no(_ONE, 1),
    "local_rank": _idle(_ONE, 0),
    "gc_steps": _idle(_MEMORY, -1),
    "gc_collect_steps": _idle(_MEMORY, -1),
    "torch_empty_cache_steps": _idle(_MEMORY),
    **{f"nemo_gym_{name}": _no(_GYM, False) for name in _NEMO_GYM},
    "plugins": _no("Axolotl's plug-ins patch Axolotl", []),
    "liger_rope": _idle(_SPEED, False),
    "liger_rms_norm": _idle(_SPEED, False),
    "liger_glu_activation": _idle(_SPEED, False),
    "liger_layer_norm": _idle(_SPEED, False),
    "liger_fused_linear_cross_entropy": _idle(_SPEED, False),
    "strict": _idle("unknown options are always refused", True, False),
    "debug": _idle("tandem --debug shows tracebacks", "", False),
    "trl": _is("the next table", "mapping"),
    "vllm": _is("the last table", "mapping"),
}
"""Options at the top level."""

TRL: Mapping[str, Option] = {
    "use_vllm": _is("engine: vllm, or else embedded", "truth"),
    "vllm_mode": _is("server: engine.urls; colocate: an engine started here, sync: shared", "text"),
    "vllm_server_host": _is("engine.urls", "text"),
    "vllm_server_port": _is("engine.urls", "whole"),
    "vllm_server_timeout": _is("engine.start_seconds", "number"),
    "vllm_gpu_memory_utilization": _is("engine.gpu_memory_utilization, with vllm_mode: colocate", "number"),
    "vllm_max_model_len": _is("context, with use_vllm", "whole"),
    "vllm_enable_prefix_caching": _is("engine.enable_prefix_caching, with vllm_mode: colocate", "truth"),
    "vllm_device": _no("a colocated engine is on the trainer's GPU; vllm_mode: server has its own", "auto"),
    "vllm_dtype": _is("nothing: it must be auto or what bf16 says", "text"),
    "num_generations": _is("group_size", "whole"),
    "generation_batch_size": _is("max_lag and old_logprobs: sampled, where it is several steps' worth", "whole"),
    "max_completion_length": _is("sampling.max_tokens", "whole"),
    "beta": _is("reference: start with this beta, none for 0", "number"),
    "num_iterations": _is("updates", "whole"),
    "epsilon": _is("loss.clip_low, and clip_high without epsilon_high", "number"),
    "epsilon_high": _is("loss.clip_high; of cispo loss.cap", "number"),
    "loss_type": _is("loss.reduction: grpo sequence, bnpo and dapo token, dr_grpo constant; or cispo, sapo", "text"),
    "scale_rewards": _is("advantage: true or group grpo, batch batch_std, false or none dr_grpo", "anything"),
    "mask_truncated_completions": _is("truncated: mask", "truth"),
    "reward_funcs": _is("rewards: functions by import path, models as reward_model", "list"),
    "reward_weights": _is("rewards: weights", "list"),
    "reward_processing_classes": _no("a reward model's own tokenizer is loaded", []),
    "multi_objective_aggregation": _is("advantage: gdpo for normalize_then_sum", "text"),
    "rollout_func": _is("env: rows that this function plays with model.generate", "text"),
    "temperature": _is("sampling.temperature", "number"),
    "top_p": _is("sampling.top_p", "number"),
    "top_k": _is("sampling.top_k; -1 is 0", "whole"),
    "min_p": _is("sampling.min_p", "number"),
    "repetition_penalty": _is("sampling.repetition_penalty", "number"),
    "generation_kwargs": _is(
        "sampling, before the options above; what the trainer cannot account for is refused", "mapping"
    ),
    "chat_template_kwargs": _is("chat_template_kwargs", "mapping"),
    "vllm_guided_decoding_regex": _is("sampling.regex, with use_vllm", "text"),
    "use_data_producer": _is(
        "the defaults of importance sampling are then those of Axolotl's asynchronous trainer", "truth"
    ),
    "async_prefetch": _is("max_lag; the defaults are then those of use_data_producer", "truth"),
    "prefetch_depth": _is("max_lag, with async_prefetch", "whole"),
    "vllm_sync_interval": _is("sync.every and max_lag, with vllm_mode: server", "whole"),
    "vllm_lora_sync": _is("sync: hotswap, else broadcast, with vllm_mode: server", "truth"),
    "streaming_partial_batch": _idle("groups are always scored one by one, as they finish", True, False),
    "streaming_min_groups": _idle("groups are always scored one by one, as they finish", 1),
    "skip_zero_advantage_batches": _is("flat_groups: drop (others are sampled in their place), else keep", "truth"),
    "reward_num_workers": _is("grading.workers", "whole"),
    "vllm_enable_sleep_mode": _is("engine.sleep, with vllm_mode: colocate and an engine of several GPUs", "truth"),
    "vllm_importance_sampling_correction": _is("corrections", "truth"),
    "vllm_importance_sampling_mode": _is("corrections: token or sequence, beyond: truncate or mask", "text"),
    "vllm_importance_sampling_cap": _is("corrections: high", "number"),
    "vllm_importance_sampling_clip_max": _is("corrections: high", "number"),
    "vllm_importance_sampling_clip_min": _is("corrections: low", "number"),
    "importance_sampling_level": _is("loss: gspo for sequence", "text"),
    "off_policy_mask_threshold": _is("corrections: opsm with this threshold", "number"),
    "use_bias_correction_kl": _is("reference.ratio_corrected", "truth"),
    "replay_buffer_size": _is("replay.size", "whole"),
    "replay_recompute_logps": _is("old_logprobs: sampled for false, where something is replayed", "truth"),
    "reroll_start_fraction": _is("reroll.start_fraction", "number"),
    "reroll_max_groups": _is("reroll.max_groups, where reroll_start_fraction is below 1", "whole"),
    "scope_rl": _no(_SCOPE, False),
    "scope_target_entropy": _idle(_SCOPE),
    "scope_alpha": _idle(_SCOPE),
    "scope_positive_threshold": _idle(_SCOPE),
    "entropy_coef": _no(_ENTROPY, 0),
    "use_adaptive_entropy": _no(_ENTROPY, False),
    "entropy_target": _idle(_ADAPTS),
    "entropy_coef_delta": _idle(_ADAPTS),
    "entropy_coef_min": _idle(_ADAPTS),
    "entropy_coef_max": _idle(_ADAPTS),
    "sync_ref_model": _is("reference: average instead of start", "truth"),
    "ref_model_mixup_alpha": _is("reference.mixup", "number"),
    "ref_model_sync_steps": _is("reference.every, divided by num_iterations", "whole"),
    "log_completions": _is("print_completions, in the console and in loggers; false: never", "truth"),
    "num_completions_to_print": _is("print_completions.count; default: all of a step's", "whole"),
    "log_multimodal": _idle("there are no images", True, False),
    "use_liger_loss": _idle("logits are always computed chunk by chunk, which is what saves the memory", False),
}
"""Options of the group ``trl``."""

VLLM: Mapping[str, Option] = {
    "host": _is("engine.host, for tandem serve engine", "text"),
    "port": _is("engine.port, for tandem serve engine", "whole"),
    "gpu_memory_utilization": _is("engine.gpu_memory_utilization", "number"),
    "dtype": _is("nothing: it must be auto or what bf16 says", "text"),
    "max_model_len": _is("context, with use_vllm", "whole"),
    "tensor_parallel_size": _is("engine.tensor_parallel_size", "whole"),
    "data_parallel_size": _is("engine.replicas", "whole"),
    "enable_prefix_caching": _is("engine.enable_prefix_caching", "truth"),
    "enforce_eager": _is("engine.enforce_eager", "truth"),
    "enable_reasoning": _no("answers are token ids; rewards look at the whole text", False),
    "reasoning_parser": _no("answers are token ids; rewards look at the whole text", ""),
    "serve_module": _no(_SERVER),
    "worker_extension_cls": _no(_SERVER),
    "device": _no("CUDA_VISIBLE_DEVICES says which GPUs the server has", "auto", "cuda"),
}
"""Options of the group ``vllm``."""

DATASET: Mapping[str, Option] = {
    "path": _is("a local file, or a name on the hub", "text"),
    "name": _is("the hub's configuration; of a local file nothing", "text"),
    "split": _is("the hub's split; default train", "text"),
    "type": _is("the transform's import path", "text"),
    "ds_type": _is("nothing: it must be what the file's name says, json, csv or parquet", "text"),
    "data_files": _is("local files, read one after the other", "anything"),
    "revision": _no("Tandem reads a data set's newest revision"),
    "trust_remote_code": _no(_TRUSTED, False),
    "shards": _no("name a split instead, or a smaller file"),
    "field_messages": _no(_COLUMNS),
    "message_field_role": _no(_COLUMNS, "role"),
    "message_field_content": _no(_COLUMNS, "content"),
}
"""Options of an entry of ``datasets`` and ``test_datasets``."""

GROUPS: Mapping[str, Mapping[str, Option]] = {"": TOP, "trl": TRL, "vllm": VLLM, "datasets": DATASET}
"""All of them, by the mapping that they stand in."""
