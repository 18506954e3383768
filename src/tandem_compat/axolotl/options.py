"""Options of an Axolotl file with ``rl: grpo``: what each becomes, why it changes nothing, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_compat.objective import CORRECTIONS, REDUCTIONS
from tandem_compat.schedules import OPTIMIZERS, SCHEDULES
from tandem_compat.table import ForeignOption, becomes, by_name, copied, idle, refused, unused

_WHOLE = "the trainer's ranks split no layer; engines do (vllm.tensor_parallel_size)"
_QUANTISED = "Tandem trains bfloat16 or float32 weights"
_LORA = "PEFT's plain LoRA is what engines serve"
_ENTROPY = "no loss here has a term of the entropy"
_TRUSTED = "Tandem runs no code from model repositories"
_COLUMNS = "name the columns in a transform: type: module.function"

TOP: Mapping[str, ForeignOption] = by_name(
    copied("base_model", "text", "model"),
    becomes("rl", "text", "grpo; gdpo is multi_objective_aggregation: normalize_then_sum"),
    becomes("chat_template", "text", "chat_template by name; jinja reads the next", "tokenizer_default"),
    becomes("chat_template_jinja", "text", "chat_template"),
    becomes("adapter", "text", "trainable: full without it, lora", ""),
    copied("lora_r", "whole", "trainable.rank", where="adapter: lora"),
    copied("lora_alpha", "whole", "trainable.alpha", where="adapter: lora"),
    becomes("lora_target_linear", "truth", "trainable.target_modules: all-linear", where="adapter: lora"),
    becomes("lora_target_modules", "anything", "trainable.target_modules", where="adapter: lora"),
    idle("lora_dropout", "anything", "Tandem has no dropout: the policy that is scored must be the one that sampled"),
    copied("peft_layers_to_transform", "list", "trainable.layers", where="adapter: lora"),
    copied("lora_modules_to_save", "list", "trainable.modules_to_save", where="adapter: lora"),
    copied("lora_target_parameters", "list", "trainable.target_parameters", where="adapter: lora"),
    *(refused(name, "anything", _LORA) for name in ("lora_fan_in_fan_out", "peft_use_dora")),
    copied("peft_use_rslora", "truth", "trainable.use_rslora", where="adapter: lora"),
    *(refused(name, "anything", _QUANTISED) for name in ("load_in_8bit", "load_in_4bit")),
    becomes("datasets", "list", "env", []),
    becomes("test_datasets", "list", "env: held-out rows, for evaluate", []),
    becomes("val_set_size", "number", "env: the share of rows that is held out, for evaluate"),
    refused("dataset_exact_deduplication", "anything", "every row is a task; take the equal ones out of the file"),
    refused("remove_unused_columns", "anything", "rewards get every column by name"),
    refused("shuffle_merged_datasets", "anything", "tasks are always shuffled, anew in every epoch", off=(True,)),
    becomes("sequence_len", "whole", "micro_batch_tokens, with micro_batch_size; it bounds no answer", 512),
    becomes("micro_batch_size", "count", "groups_per_step, micro_batch_tokens", 1),
    becomes("gradient_accumulation_steps", "count", "groups_per_step", 1),
    becomes("max_steps", "whole", "steps, divided by num_iterations", 0),
    becomes("num_epochs", "positive", "steps: rows x epochs / groups_per_step, where max_steps is left out", 1),
    copied("learning_rate", "number", "optimizer.lr"),
    becomes("optimizer", "text", "optimizer.kind", "adamw_torch_fused", choices=OPTIMIZERS),
    becomes("lr_scheduler", "text", "optimizer.schedule", "cosine", choices=SCHEDULES),
    copied("cosine_min_lr_ratio", "number", "optimizer.min_lr_ratio", where="lr_scheduler: cosine"),
    becomes("lr_scheduler_kwargs", "mapping",
        "optimizer.min_lr_ratio: min_lr or min_lr_rate; of warmup_stable_decay decay_steps, decay and min_lr_ratio: "
        "num_decay_steps, decay_type and min_lr_ratio", {}),
    becomes("warmup_steps", "whole", "optimizer.warmup_steps, divided by num_iterations", where="warm-up"),
    becomes("warmup_ratio", "share", "optimizer.warmup_steps", 0.03, where="warm-up"),
    copied("weight_decay", "number", "optimizer.weight_decay"),
    copied("adam_beta1", "number", "optimizer.beta1"),
    copied("adam_beta2", "number", "optimizer.beta2"),
    copied("adam_epsilon", "number", "optimizer.eps"),
    copied("max_grad_norm", "number", "optimizer.max_grad_norm"),
    becomes("bf16", "anything", "dtype", choices=(True, False, "auto", "full")),
    refused("fp16", "anything", "Tandem trains bfloat16 or float32; write bf16: true"),
    becomes("float32", "truth", "dtype", False),
    becomes("fp8", "truth", "matmul: fp8"),
    copied("torch_compile", "anything", "compile"),
    becomes("gradient_checkpointing", "anything", "checkpointing: full or none",
        choices=(True, False, "offload", "offload_disk")),
    refused("train_on_inputs", "anything", "only sampled tokens are trained"),
    becomes("special_tokens", "mapping", "nothing: a pad token is not needed, others must be the tokenizer's own", {}),
    refused("tokens", "anything", "the vocabulary is the model's own"),
    becomes("tokenizer_config", "text", "nothing: it must be base_model"),
    refused("trust_remote_code", "anything", _TRUSTED),
    copied("output_dir", "text", "runs", "model-out"),
    becomes("logging_steps", "number", "print_completions.every; numbers are logged every step", 1),
    becomes("save_steps", "number", "checkpoint.every, divided by num_iterations; below 1 a share of all steps"),
    copied("save_total_limit", "whole", "checkpoint.keep"),
    idle("save_strategy", "anything", "checkpoints are written every save_steps and at the end", off=("steps",)),
    becomes("saves_per_epoch", "positive", "checkpoint.every: all steps / (saves_per_epoch x num_epochs)"),
    refused("save_safetensors", "anything", "checkpoints are safetensors", off=(True,)),
    refused("save_only_model", "anything", "a checkpoint is what a run is resumed from"),
    becomes("eval_steps", "number", "evaluate.every, divided by num_iterations; below 1 a share of all steps"),
    becomes("evals_per_epoch", "positive", "evaluate.every: all steps / (evals_per_epoch x num_epochs)"),
    idle("eval_strategy", "anything", "held-out rows are looked at every eval_steps, before and after", off=("steps",)),
    copied("seed", "whole", "seed"),
    becomes("wandb_project", "text", "the wandb logger"),
    becomes("wandb_entity", "text", "the wandb logger's entity", where="use_wandb"),
    becomes("wandb_mode", "text", "the wandb logger's mode; disabled leaves it out", where="use_wandb"),
    copied("wandb_name", "text", "name"),
    *(refused(name, "anything", "the wandb logger has project, entity, mode and a run's name (wandb_name)")
      for name in ("wandb_run_id", "wandb_watch", "wandb_log_model")),
    becomes("use_wandb", "truth", "the wandb logger"),
    becomes("use_tensorboard", "truth", "the tensorboard logger"),
    becomes("use_trackio", "truth", "the trackio logger"),
    becomes("trackio_project_name", "text", "the trackio logger's project", where="use_trackio"),
    becomes("trackio_space_id", "text", "the trackio logger's space", where="use_trackio"),
    *(refused(name, "anything", "loggers are console, wandb, tensorboard and trackio")
      for name in ("use_mlflow", "use_comet")),
    refused("hub_model_id", "anything", "a trained model is uploaded by tandem push"),
    *(refused(name, "anything", "a run is resumed by its folder: tandem train RUN")
      for name in ("resume_from_checkpoint", "auto_resume_from_checkpoints", "lora_model_dir")),
    refused("early_stopping_patience", "anything", "a run ends after its steps, or by Ctrl-C"),
    becomes("fsdp", "anything", "distributed.shard: full_shard weights, shard_grad_op states", []),
    becomes("fsdp_config", "mapping", "distributed.shard, checkpointing and optimizer: adamw_cpu", {}),
    becomes("fsdp_version", "whole", "nothing: sharding is Tandem's own, by the keys of either version"),
    becomes("deepspeed", "anything", "distributed.shard and optimizer: adamw_cpu, by the file that it names"),
    becomes("dp_shard_size", "count", "ranks, times dp_replicate_size", 1),
    becomes("dp_replicate_size", "count", "ranks, times dp_shard_size; distributed.replicas", 1),
    becomes("context_parallel_size", "count", "distributed.context_parallel", 1),
    becomes("sequence_parallel_degree", "count", "distributed.context_parallel", 1),
    *(refused(name, "anything", _WHOLE, off=(1,)) for name in ("tensor_parallel_size", "expert_parallel_size")),
    *(refused(f"nemo_gym_{name}", "anything", "NeMo Gym's servers are not asked; play with an environment (env)")
      for name in ("enabled", "dir", "auto_start", "head_port", "multi_turn", "verify_timeout", "datasets")),
    becomes("plugins", "list", "nothing: those that only make Axolotl faster are left out, others are refused", []),
    *unused("anything",
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
        "liger_fused_linear_cross_entropy cut_cross_entropy skip_prepare_dataset dataset_prepared_path "
        "dataset_processes dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "tf32 gradient_checkpointing_kwargs attn_implementation flash_attention sdp_attention xformers_attention "
        "eager_attention flex_attention sample_packing eval_sample_packing pad_to_sequence_len group_by_length "
        "model_type tokenizer_type tokenizer_use_fast tokenizer_legacy eot_tokens hf_use_auth_token low_cpu_mem_usage "
        "eval_batch_size eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval "
        "loss_watchdog_threshold loss_watchdog_patience save_first_step fsdp_final_state_dict_type ddp_timeout "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters local_rank gc_steps gc_collect_steps "
        "torch_empty_cache_steps include_tokens_per_second strict debug excess_length_strategy"),
    becomes("trl", "mapping", "the next table"),
    becomes("vllm", "mapping", "the last table"),
)  # fmt: skip
"""Options at the top level."""

TRL: Mapping[str, ForeignOption] = by_name(
    becomes("use_vllm", "truth", "engine: vllm, or else embedded", False),
    becomes("vllm_mode", "text",
        "server: engine.urls; colocate: an engine started here, sync: shared", "server", where="vllm",
        choices=("server", "colocate")),
    becomes("vllm_server_host", "text", "engine.urls", "0.0.0.0", where="server"),
    becomes("vllm_server_port", "whole", "engine.urls", 8000, where="server"),
    becomes("vllm_server_timeout", "number", "engine.start_seconds", 240.0, where="server"),
    becomes("vllm_gpu_memory_utilization", "number", "engine.gpu_memory_utilization", where="colocate"),
    becomes("vllm_max_model_len", "whole", "context, with use_vllm", where="vllm"),
    becomes("vllm_enable_prefix_caching", "truth", "engine.enable_prefix_caching", where="colocate"),
    refused("vllm_device", "anything", "a colocated engine is on the trainer's GPU; vllm_mode: server has its own",
        off=("auto",)),
    refused("vllm_dtype", "text", "the engine samples from the trained weights", "auto", off=("bfloat16",)),
    copied("num_generations", "count", "group_size", 8),
    becomes("generation_batch_size", "count", "max_lag and old_logprobs: sampled, where it is several steps' worth"),
    copied("max_completion_length", "whole", "sampling.max_tokens", 512),
    becomes("beta", "number", "reference: start with this beta, none for 0", 0.0),
    copied("num_iterations", "count", "updates_per_batch", 1),
    becomes("epsilon", "number", "loss.clip_low, and clip_high without epsilon_high", 0.2),
    becomes("epsilon_high", "number", "loss.clip_high; of cispo loss.cap"),
    becomes("loss_type", "text",
        "loss.reduction: grpo sequence, bnpo and dapo token, dr_grpo constant; or cispo, sapo", "dapo",
        choices=REDUCTIONS),
    becomes("scale_rewards", "anything", "advantage: true or group grpo, batch batch_std, false or none dr_grpo", True,
        choices=(True, False, "group", "batch", "none")),
    becomes("mask_truncated_completions", "truth", "truncated: mask"),
    becomes("reward_funcs", "texts", "rewards: functions by import path, models as reward_model", []),
    becomes("reward_weights", "numbers", "rewards: weights"),
    refused("reward_processing_classes", "anything", "a reward model's own tokenizer is loaded"),
    becomes("multi_objective_aggregation", "text", "advantage: gdpo for normalize_then_sum",
        choices=("sum_then_normalize", "normalize_then_sum")),
    becomes("rollout_func", "text", "env: rows that this function plays with model.generate"),
    copied("temperature", "number", "sampling.temperature"),
    copied("top_p", "number", "sampling.top_p"),
    becomes("top_k", "whole", "sampling.top_k; -1 is 0"),
    copied("min_p", "number", "sampling.min_p"),
    copied("repetition_penalty", "number", "sampling.repetition_penalty"),
    becomes("generation_kwargs", "mapping", "sampling, before the options above", {}),
    copied("chat_template_kwargs", "mapping", "chat_template_kwargs"),
    copied("vllm_guided_decoding_regex", "text", "sampling.regex", where="vllm"),
    becomes("use_data_producer", "truth", "the asynchronous trainer's defaults of importance sampling"),
    becomes("async_prefetch", "truth", "max_lag; the defaults are then those of use_data_producer"),
    becomes("prefetch_depth", "count", "max_lag, with async_prefetch", 1, where="async_prefetch"),
    becomes("vllm_sync_interval", "count", "sync.every and max_lag, with vllm_mode: server", 1, where="server"),
    becomes("vllm_lora_sync", "truth", "sync: hotswap, else broadcast, with vllm_mode: server", False, where="server"),
    becomes("skip_zero_advantage_batches", "truth", "zero_variance_groups: drop, else keep", True),
    copied("reward_num_workers", "whole", "grading.workers"),
    becomes("vllm_enable_sleep_mode", "truth", "engine.sleep, of an engine of several GPUs", where="colocate"),
    becomes("vllm_importance_sampling_correction", "truth", "corrections", True, where="vllm"),
    becomes("vllm_importance_sampling_mode", "text", "corrections", where="corrections", choices=CORRECTIONS),
    becomes("vllm_importance_sampling_cap", "number", "corrections: high", where="corrections"),
    becomes("vllm_importance_sampling_clip_max", "number", "corrections: high", where="corrections"),
    becomes("vllm_importance_sampling_clip_min", "number", "corrections: low", where="corrections"),
    becomes("importance_sampling_level", "text", "loss: gspo for sequence", "token", choices=("token", "sequence")),
    becomes("off_policy_mask_threshold", "number", "corrections: opsm with this threshold"),
    becomes("use_bias_correction_kl", "truth", "reference.ratio_corrected", where="beta"),
    becomes("replay_buffer_size", "whole", "replay.size", 0),
    becomes("replay_recompute_logps", "truth", "old_logprobs: sampled for false, where something is replayed", True),
    becomes("reroll_start_fraction", "number", "reroll.start_fraction", 1),
    becomes("reroll_max_groups", "whole", "reroll.max_groups, where reroll_start_fraction is below 1"),
    refused("scope_rl", "anything", "Tandem does not have SCOPE-RL"),
    *(refused(name, "anything", _ENTROPY) for name in ("entropy_coef", "use_adaptive_entropy")),
    becomes("sync_ref_model", "truth", "reference: average instead of start", False, where="beta"),
    copied("ref_model_mixup_alpha", "number", "reference.mixup", 0.9, where="sync_ref_model"),
    becomes("ref_model_sync_steps", "whole", "reference.every, in updates", 64, where="sync_ref_model"),
    *unused("anything",
        "streaming_partial_batch streaming_min_groups scope_target_entropy scope_alpha scope_positive_threshold "
        "entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max log_multimodal use_liger_loss"),
    becomes("log_completions", "truth", "print_completions, in the console and in loggers; false: never"),
    becomes("num_completions_to_print", "whole", "print_completions.count; default: all", where="log_completions"),
)  # fmt: skip
"""Options of the group ``trl``."""

VLLM: Mapping[str, ForeignOption] = by_name(
    becomes("host", "text", "engine.host, for tandem serve engine", "0.0.0.0", where="server"),
    becomes("port", "whole", "engine.port, for tandem serve engine", 8000, where="server"),
    becomes("gpu_memory_utilization", "number", "engine.gpu_memory_utilization", where="vllm"),
    refused("dtype", "text", "the engine samples from the trained weights", "auto", off=("bfloat16",)),
    becomes("max_model_len", "whole", "context, with use_vllm", where="vllm"),
    becomes("tensor_parallel_size", "whole", "engine.tensor_parallel_size", where="vllm"),
    becomes("data_parallel_size", "whole", "engine.replicas", 1, where="vllm"),
    becomes("enable_prefix_caching", "truth", "engine.enable_prefix_caching", where="vllm"),
    becomes("enforce_eager", "truth", "engine.enforce_eager", where="vllm"),
    *(refused(name, "anything", "answers are token ids; rewards look at the whole text")
      for name in ("enable_reasoning", "reasoning_parser")),
    *(refused(name, "anything", "tandem serve engine is the server")
      for name in ("serve_module", "worker_extension_cls")),
    refused("device", "anything", "CUDA_VISIBLE_DEVICES says which GPUs the server has", off=("auto", "cuda")),
)  # fmt: skip
"""Options of the group ``vllm``."""

DATASET: Mapping[str, ForeignOption] = by_name(
    becomes("path", "text", "a local file, or a name on the hub"),
    becomes("name", "text", "the hub's configuration; of a local file nothing"),
    becomes("split", "text", "the hub's split; default train"),
    becomes("type", "text", "the transform's import path"),
    becomes("ds_type", "text", "nothing: it must be what the file's name says, json, csv or parquet"),
    becomes("data_files", "anything", "local files, read one after the other"),
    refused("revision", "anything", "Tandem reads a data set's newest revision"),
    refused("trust_remote_code", "anything", _TRUSTED),
    refused("shards", "anything", "name a split instead, or a smaller file"),
    *(refused(name, "anything", _COLUMNS, off=("role", "content"))
      for name in ("field_messages", "message_field_role", "message_field_content")),
)  # fmt: skip
"""Options of an entry of ``datasets`` and ``test_datasets``."""

GROUPS: Mapping[str, Mapping[str, ForeignOption]] = {"": TOP, "trl": TRL, "vllm": VLLM, "datasets": DATASET}
"""All of them, by the mapping that they stand in."""
