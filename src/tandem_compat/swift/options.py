"""Every argument of ms-swift's GRPO and of its engine's commands: what it becomes, or why it does not.

Where the text of an argument's ``becomes`` says what it is in a recipe, ``rules`` and ``parts`` do so.
"""

from __future__ import annotations

from tandem.errors import DOCS
from tandem.types import Json
from tandem_compat.objective import CORRECTIONS, REDUCTIONS, SCALES
from tandem_compat.schedules import OPTIMIZERS, SCHEDULES
from tandem_compat.table import NOTHING, ForeignOption, Takes, becomes, copied, idle, refused, unused

_ROWS = "rows are read once, when a run starts"
_GONE = "the engine's weights are the trainer's, so there is no second copy to move or release"
_QUANTISED = "Tandem trains bfloat16 or float32 weights"
_LORA = "Tandem trains PEFT's plain LoRA"
_TURNS = f"conversations of several turns are an environment ({DOCS}/guide/multi-turn/)"
_PLAYED = "the trainer plays, so give it to tandem swift rlhf"
_RESUME = "to go on with a run: tandem train RUN"

_ENGINE: tuple[tuple[str, Takes, Json], ...] = (
    ("gpu_memory_utilization", "number", None), ("tensor_parallel_size", "count", 1), ("max_model_len", "whole", None),
    ("max_num_seqs", "whole", 256), ("enforce_eager", "truth", False), ("limit_mm_per_prompt", "mapping", None),
    ("enable_prefix_caching", "truth", None),
)  # fmt: skip
_ARGS: tuple[tuple[str, Takes, Json], ...] = (
    ("disable_custom_all_reduce", "truth", False), ("disable_cascade_attn", "truth", False),
    ("enable_expert_parallel", "truth", False), ("max_logprobs", "whole", None),
)  # fmt: skip
ENGINE: tuple[ForeignOption, ...] = (
    *(copied(f"vllm_{name}", takes, f"engine.{name}", default, name, where="colocate")
      for name, takes, default in _ENGINE),
    becomes("vllm_enable_lora", "truth", "trainable.merged: false, so that the adapter travels", False, where="vllm"),
    copied("vllm_engine_kwargs", "mapping", "engine.args", None, where="colocate"),
    *(copied(f"vllm_{name}", takes, f"engine.args.{name}", default, name, where="colocate")
      for name, takes, default in _ARGS),
    refused("vllm_pipeline_parallel_size", "whole", "an engine is split by tensor_parallel_size alone", 1),
    refused("vllm_quantization", "text", _QUANTISED + ", and the engine samples from them"),
    refused("vllm_speculative_config", "text", "its drafts are not versioned with the policy"),
)  # fmt: skip
"""Options of vLLM that both commands have."""

_BASE: tuple[ForeignOption, ...] = (
    copied("model", "text", "model", None, "model_id_or_path"),
    becomes("torch_dtype", "text", "dtype: bfloat16 or float32", "bfloat16", ("dtype",), path="dtype",
        choices=("bfloat16", "float32")),
    copied("seed", "whole", "seed", 42),
    becomes("max_length", "count", "context, with max_completion_length added"),
    idle("template", "text", "the tokenizer's chat template is used; chat_template names another"),
    *(refused(name, "anything", _QUANTISED) for name in ("quant_method", "quant_bits")),
    *(refused(name, "texts", "merge the adapter first and name the folder as model")
      for name in ("adapters", "ref_adapters", "reward_adapters")),
    *(refused(name, "texts", "download that revision and name its folder instead of a hub's name")
      for name in ("model_revision", "reward_model_revision")),
    *unused("text", "model_type task_type attn_impl"),
    *unused("truth", "use_hf check_model"),
)  # fmt: skip

_LEARNING: tuple[ForeignOption, ...] = (
    becomes("rlhf_type", "text", "nothing: it must be grpo", "grpo", choices=("grpo",)),
    becomes("train_type", "text", "trainable: lora or full", "lora", ("tuner_type", "sft_type"), path="trainable.kind",
        choices=("lora", "full")),
    becomes("per_device_train_batch_size", "count", "groups_per_step, with gradient_accumulation_steps", 1),
    becomes("gradient_accumulation_steps", "count", "groups_per_step", 1),
    becomes("mini_batch_size", "count", "micro_batch_tokens, with max_length", where="max_length"),
    becomes("generation_batch_size", "count", "sync.every and max_lag: steps that one round of generation is for"),
    becomes("steps_per_generation", "count", "sync.every and max_lag"),
    copied("num_generations", "count", "group_size", 8),
    becomes("num_train_epochs", "positive", "steps, by the rows of the data", 3.0),
    becomes("max_steps", "whole", "steps", -1),
    becomes("learning_rate", "positive", "optimizer.lr; default 1e-4 for an adapter, 1e-5 for all weights"),
    becomes("lr_scheduler_type", "text", "optimizer.schedule", "cosine", choices=SCHEDULES),
    becomes("lr_scheduler_kwargs", "mapping", "optimizer.min_lr_ratio, or of warmup_stable_decay its decay"),
    becomes("warmup_ratio", "share", "optimizer.warmup_steps, as a share of steps", 0.0, where="warm-up"),
    becomes("warmup_steps", "whole", "optimizer.warmup_steps", 0, where="warm-up"),
    copied("weight_decay", "number", "optimizer.weight_decay", 0.1),
    copied("adam_beta1", "number", "optimizer.beta1", 0.9, where="an Adam optimizer"),
    copied("adam_beta2", "number", "optimizer.beta2", 0.95, where="an Adam optimizer"),
    copied("adam_epsilon", "number", "optimizer.eps", 1e-8, where="an Adam optimizer"),
    copied("max_grad_norm", "number", "optimizer.max_grad_norm", 1.0),
    becomes("optim", "text", "optimizer", "adamw_torch_fused", choices=OPTIMIZERS),
    becomes("offload_optimizer", "truth", "optimizer: adamw_cpu, whose states are always in host memory", False),
    becomes("gradient_checkpointing", "truth", "checkpointing: full or none", True),
    becomes("beta", "number", "reference: start with this beta; 0: none", 0.04),
    copied("epsilon", "number", "loss.clip_low", 0.2, where="clipped ratios"),
    becomes("epsilon_high", "number", "loss.clip_high; of cispo its cap; default: epsilon", where="a high clip"),
    becomes("delta", "number", "loss.dual_clip", where="grpo's clipped ratios"),
    copied("tau_pos", "number", "loss.temperature_positive", 1.0, where="loss_type sapo"),
    copied("tau_neg", "number", "loss.temperature_negative", 1.05, where="loss_type sapo"),
    becomes("loss_type", "text", "loss.reduction: grpo sequence, bnpo and dapo token, dr_grpo constant; or cispo, sapo",
        "grpo", choices=REDUCTIONS),
    becomes("importance_sampling_level", "text", "loss: grpo for token, gspo for sequence", "token", where="clipping",
        choices=("token", "sequence", "sequence_token")),
    becomes("advantage_estimator", "text", "advantage: grpo, rloo, or for reinforce_plus_plus batch_std", "grpo",
        choices=("grpo", "rloo", "reinforce_plus_plus")),
    becomes("scale_rewards", "text", "advantage: grpo, batch_std, dr_grpo or gdpo", choices=SCALES),
    copied("num_iterations", "count", "updates_per_batch", 1),
    becomes("rollout_importance_sampling_mode", "text", "corrections, old_logprobs: recomputed", choices=CORRECTIONS),
    becomes("rollout_importance_sampling_threshold", "number", "corrections.high", 2.0, where="corrections"),
    becomes("sync_ref_model", "truth", "reference: average", False, where="beta"),
    copied("ref_model_mixup_alpha", "number", "reference.mixup", 0.6, where="sync_ref_model"),
    becomes("ref_model_sync_steps", "count", "reference.every", 512, where="sync_ref_model"),
    becomes("ref_model", "text", "nothing: it must be model, with which a run begins", where="beta"),
    copied("lora_rank", "whole", "trainable.rank", 8, where="lora"),
    copied("lora_alpha", "whole", "trainable.alpha", 32, where="lora"),
    becomes("target_modules", "texts", "trainable.target_modules", ["all-linear"], where="lora"),
    becomes("kl_in_reward", "truth", "reference.in_reward; default: false for grpo, else true", where="beta"),
    becomes("off_policy_sequence_mask_delta", "number", "corrections: opsm with this threshold"),
    becomes("sequence_parallel_size", "count", "distributed.context_parallel", 1),
    copied("router_aux_loss_coef", "number", "router_aux_loss_coef", 0.0),
    becomes("loss_scale", "text", "nothing: last_round or default; either trains every sampled token", "last_round",
        choices=("last_round", "default")),
    refused("top_entropy_quantile", "number", "every sampled token is trained", 1.0),
    copied("use_rslora", "truth", "trainable.use_rslora", False, where="lora"),
    *(refused(name, "anything", _LORA, off=(*NOTHING, "peft", "none", "true"))
      for name in ("tuner_backend", "lora_bias", "lorap_lr_ratio", "init_weights")),
    refused("use_dora", "truth", _LORA, False),
    copied("modules_to_save", "texts", "trainable.modules_to_save", where="lora"),
    copied("target_parameters", "texts", "trainable.target_parameters", where="lora"),
    *(refused(name, "texts", "trainable.layers names what is trained", off=([], ["0"], ["0.0"]))
      for name in ("freeze_parameters", "freeze_parameters_ratio", "trainable_parameters")),
    becomes("target_regex", "text", "trainable.target_modules, as a regular expression of whole names", where="lora"),
    idle("lora_dropout", "number", "Tandem has no dropout: the policy that is scored must be the one that sampled",
        where="lora", off=(0,)),
    becomes("deepspeed", "text", "distributed.shard and optimizer: adamw_cpu, by zero0 to zero3_offload or a file"),
    becomes("fsdp", "text", "distributed.shard and checkpointing, by fsdp2 or a file"),
    refused("fp16", "truth", _QUANTISED, False),
    idle("bf16", "truth", "torch_dtype says so"),
)  # fmt: skip

_DATA: tuple[ForeignOption, ...] = (
    becomes("dataset", "texts", "env, or with several envs: files or names on the hub; path#N takes the first N rows"),
    becomes("val_dataset", "texts", "env.test_path"),
    becomes("split_dataset_ratio", "number", "env.test_share", 0.0, where="an eval_strategy"),
    becomes("system", "text", "env.system: a text, or a .txt file of it"),
    becomes("eval_steps", "positive", "evaluate.every; default: save_steps", where="eval_strategy steps"),
    becomes("num_generations_eval", "whole", "evaluate.samples; default: num_generations", where="held-out rows"),
    becomes("reward_funcs", "texts", "rewards: ms-swift's built-in ones, or of external_plugins", []),
    becomes("reward_weights", "numbers", "rewards.*.weight; reward models come last"),
    becomes("external_plugins", "texts", "where names of reward_funcs are looked up", [],
        ("plugin", "custom_register_path")),
    becomes("reward_model", "texts", "rewards: reward_model", []),
    refused("reward_model_plugin", "texts", "write a reward function instead", off=(["default"],)),
    becomes("cosine_min_len_value_wrong", "number", "rewards.cosine.wrong_short", -0.5, where="cosine"),
    becomes("cosine_max_len_value_wrong", "number", "rewards.cosine.wrong_long", 0.0, where="cosine"),
    becomes("cosine_min_len_value_correct", "number", "rewards.cosine.right_short", 1.0, where="cosine"),
    becomes("cosine_max_len_value_correct", "number", "rewards.cosine.right_long", 0.5, where="cosine"),
    becomes("cosine_max_len", "whole", "rewards.cosine.max_tokens; default: max_completion_length", where="cosine"),
    becomes("repetition_n_grams", "whole", "rewards.repetition.ngram", 3, where="repetition"),
    becomes("repetition_max_penalty", "number", "rewards.repetition.weight, its sign turned", -1.0, where="repetition"),
    becomes("soft_max_length", "whole", "rewards.soft_overlong.max_tokens", where="soft_overlong"),
    becomes("soft_cache_length", "whole", "rewards.soft_overlong.cache", where="soft_overlong"),
    idle("truncation_strategy", "text", "a prompt without room is an error here", off=("raise",)),
    becomes("columns", "mapping", "env.columns: names in the data, and what they are called here"),
    refused("dataset_shuffle", "truth", "tasks are always drawn in a shuffled order", True),
    refused("streaming", "truth", _ROWS, False),
)  # fmt: skip

_SAMPLING: tuple[ForeignOption, ...] = (
    copied("max_completion_length", "count", "sampling.max_tokens", 512, "max_new_tokens", "response_length"),
    copied("enable_thinking", "truth", "chat_template_kwargs.enable_thinking"),
    copied("temperature", "number", "sampling.temperature", 0.9),
    copied("top_p", "number", "sampling.top_p", 1.0),
    becomes("top_k", "whole", "sampling.top_k", -1),
    copied("min_p", "number", "sampling.min_p", 0.0),
    copied("repetition_penalty", "number", "sampling.repetition_penalty", 1.0),
    copied("stop_words", "texts", "sampling.stop", []),
    becomes("dynamic_sample", "truth", "zero_variance_groups: drop", False),
    copied("max_resample_times", "count", "max_resample_times", 3, where="dynamic_sample"),
    becomes("overlong_filter", "truth", "truncated: mask", False),
    becomes("use_vllm", "truth", "engine: vllm; else embedded", False),
    becomes("vllm_mode", "text", "colocate: an engine started here; server: one that runs already", where="vllm",
        choices=("colocate", "server")),
    becomes("vllm_server_host", "texts", "engine.urls", where="server"),
    becomes("vllm_server_port", "texts", "engine.urls", ["8000"], where="server"),
    becomes("vllm_server_base_url", "texts", "engine.urls", where="server"),
    becomes("vllm_server_timeout", "number", "engine.start_seconds: how long it may not be there yet", 120.0,
        where="server", path="engine.start_seconds"),
    becomes("async_generate", "truth", "max_lag: 1 more", False, where="vllm"),
    becomes("vllm_device", "texts", "engine.devices, such as cuda:1; auto: the last ones", where="colocate"),
    becomes("num_infer_workers", "count", "engine.devices, with vllm_device auto: so many", where="colocate"),
    becomes("sleep_level", "whole", "engine.sleep, where vllm_tensor_parallel_size is above 1; else " + _GONE, 0,
        where="colocate", choices=(0, 1, 2)),
    copied("structured_outputs_regex", "text", "sampling.regex", None, "vllm_structured_outputs_regex", where="vllm"),
    *(refused(name, "text", _TURNS) for name in ("multi_turn_scheduler", "multi_turn_func", "gym_env")),
    idle("max_turns", "count", "it bounds a multi_turn_scheduler"),
    refused("agent_template", "text", "tools are written by the tokenizer's chat template", None, "tools_prompt"),
    refused("use_gym_env", "truth", _TURNS, False),
    refused("use_lmdeploy", "truth", "engines are embedded and vllm", False),
)  # fmt: skip

_RUN: tuple[ForeignOption, ...] = (
    becomes("output_dir", "text", "runs, the folder of the run's folder; default: output/ and the model's name"),
    becomes("add_version", "truth", "name: false makes output_dir the run's folder itself", True),
    becomes("save_steps", "positive", "checkpoint.every; below 1 a share of steps", 500, where="save_strategy steps"),
    becomes("save_total_limit", "count", "checkpoint.keep; default: all", where="a save_strategy"),
    becomes("save_strategy", "text", "checkpoint.every: epoch saves after each, no the last step alone", "steps",
        choices=("steps", "epoch", "no")),
    becomes("log_completions", "truth", "loggers: completions.jsonl in the run's folder", True),
    becomes("report_to", "texts", "loggers: tensorboard, wandb or trackio", []),
    becomes("run_name", "text", "name"),
    refused("resume_from_checkpoint", "text", _RESUME),
    refused("push_to_hub", "truth", "tandem export makes a folder to upload", False),
    becomes("eval_strategy", "text", "evaluate.every: steps by eval_steps, epoch after each; no: none; default: "
        "save_strategy", choices=("steps", "epoch", "no")),
    refused("load_best_model_at_end", "truth", "every checkpoint is kept: tandem export RUN DEST --step N", False),
    idle("logging_steps", "number", "every step is written down"),
)  # fmt: skip

_UNUSED: tuple[ForeignOption, ...] = (
    *unused("text",
        "lora_dtype ddp_backend swanlab_project swanlab_workspace swanlab_exp_name swanlab_mode logging_dir"),
    *unused("texts", "reward_model_type vllm_server_group_port"),
    *unused("whole",
        "ddp_timeout data_seed dataset_num_proc dataloader_num_workers per_device_eval_batch_size vllm_max_lora_rank "
        "move_model_batches"),
    *unused("number", "vllm_mm_processor_cache_gb"),
    *unused("mapping", "gradient_checkpointing_kwargs"),
    *unused("truth",
        "freeze_vit freeze_llm freeze_aligner ddp_find_unused_parameters ds3_gather_for_generation padding_free "
        "packing use_liger_kernel use_logits_to_keep log_entropy log_rollout_offpolicy_metrics "
        "dataloader_pin_memory dataloader_drop_last load_from_cache_file lazy_tokenize strict remove_unused_columns "
        "enable_flattened_weight_sync offload_model gc_collect_after_offload vllm_server_pass_dataset "
        "wandb_log_unique_prompts logging_first_step save_only_model create_checkpoint_symlink ignore_args_error"),
)  # fmt: skip

RLHF: tuple[ForeignOption, ...] = (*_BASE, *_DATA, *_LEARNING, *_SAMPLING, *ENGINE, *_RUN, *_UNUSED)
"""Of ``swift rlhf --rlhf_type grpo``."""

DEPLOY: tuple[ForeignOption, ...] = (
    *(argument for argument in _BASE if argument.name != "max_length"),
    *ENGINE,
    copied("max_length", "count", "context"),
    copied("host", "text", "engine.host", "0.0.0.0"),
    copied("port", "whole", "engine.port", 8000),
    becomes("vllm_max_lora_rank", "whole", "trainable.rank of the adapter that will be trained", 16, where="lora",
        path="trainable.rank"),
    becomes("target_modules", "texts", "trainable.target_modules", ["all-linear"], where="lora"),
    becomes("vllm_data_parallel_size", "whole", "engine.replicas, at this port and the next ones", 1,
        ("data_parallel_size",), path="engine.replicas"),
    becomes("api_key", "text", "engine.api_key_variable"),
    becomes("infer_backend", "text", "nothing: it must be vllm", "vllm", choices=("vllm",)),
    refused("served_model_name", "text", "an engine is known by its model, which is what a trainer asks for"),
    refused("use_gym_env", "truth", _TURNS, False),
    *(idle(name, "anything", _PLAYED)
      for name in ("multi_turn_scheduler", "max_turns", "max_new_tokens", "temperature")),
    idle("external_plugins", "texts", _PLAYED, "plugin", "custom_register_path"),
    *unused("whole", "log_interval"),
    *unused("truth", "vllm_use_async_engine use_async_engine verbose"),
)  # fmt: skip
"""Of ``swift deploy`` and ``swift rollout``."""
