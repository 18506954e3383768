"""Fields of TRL's ``GRPOConfig``: what each becomes, why it changes nothing, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tandem.errors import DOCS
from tandem_compat.axolotl.options import TOP, TRL
from tandem_compat.schedules import OPTIMIZERS, SCHEDULES
from tandem_compat.table import ForeignOption, becomes, by_name, copied, idle, refused, unused

_SHARED = (
    "num_generations max_completion_length beta num_iterations epsilon epsilon_high loss_type scale_rewards "
    "mask_truncated_completions reward_weights multi_objective_aggregation temperature top_p top_k min_p "
    "repetition_penalty generation_kwargs chat_template_kwargs importance_sampling_level off_policy_mask_threshold "
    "use_bias_correction_kl sync_ref_model ref_model_mixup_alpha ref_model_sync_steps use_vllm vllm_server_host "
    "vllm_server_port vllm_server_timeout vllm_gpu_memory_utilization vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_cap log_completions num_completions_to_print"
)
"""Those that Axolotl's files have by the same names and defaults in their group trl."""
_TOP = "gradient_accumulation_steps weight_decay adam_beta1 adam_beta2 adam_epsilon"
"""The same, of their top level."""

OPTIONS: Mapping[str, ForeignOption] = by_name(
    *(TRL[name] for name in _SHARED.split()),
    replace(TRL["vllm_mode"], default="colocate"),
    replace(TRL["vllm_importance_sampling_cap"], also=("vllm_importance_sampling_clip_max",)),
    becomes("output_dir", "text", "runs: the folder of runs", "trainer_output", path="runs"),
    copied("run_name", "text", "name"),
    becomes("per_device_train_batch_size", "count", "groups_per_step, with gradient_accumulation_steps", 8),
    becomes("steps_per_generation", "count", "max_lag, where it is several steps' worth"),
    becomes("generation_batch_size", "count", "max_lag, where it is several steps' worth"),
    becomes("max_steps", "whole", "steps", -1),
    becomes("num_train_epochs", "positive", "steps, by the rows of the data", 3.0),
    becomes("learning_rate", "number", "optimizer.lr", 1e-6, path="optimizer.lr"),
    becomes("lr_scheduler_type", "text", "optimizer.schedule", "linear", choices=SCHEDULES),
    becomes("lr_scheduler_kwargs", "mapping", "optimizer.min_lr_ratio and the like", {}),
    becomes("optim", "text", "optimizer.kind", "adamw_torch_fused", choices=OPTIMIZERS),
    becomes("warmup_steps", "number", "optimizer.warmup_steps; below 1 a share of all", 0),
    becomes("warmup_ratio", "share", "optimizer.warmup_steps", 0.0),
    *(TOP[name] for name in _TOP.split()),
    copied("max_grad_norm", "number", "optimizer.max_grad_norm", 1.0),
    copied("delta", "number", "loss.dual_clip", where="clipped ratios"),
    copied("sapo_temperature_pos", "number", "loss.temperature_positive", where="loss_type: sapo"),
    copied("sapo_temperature_neg", "number", "loss.temperature_negative", where="loss_type: sapo"),
    copied("seed", "whole", "seed", 42),
    becomes("bf16", "truth", "dtype: bfloat16, or float32 for false"),
    becomes("gradient_checkpointing", "truth", "checkpointing: full or none", True),
    becomes("save_steps", "number", "checkpoint.every; below 1 a share of all", 500),
    copied("save_total_limit", "count", "checkpoint.keep"),
    becomes("save_strategy", "text", "checkpoint.every", "steps", choices=("steps", "no", "epoch")),
    becomes("eval_steps", "number", "evaluate.every; below 1 a share of all", where="eval_strategy: steps"),
    becomes("eval_strategy", "text", "evaluate, with eval_dataset", "no", choices=("steps", "no", "epoch")),
    becomes("report_to", "anything", "loggers: wandb, tensorboard, trackio or none", "none"),
    becomes("logging_steps", "number", "print_completions.every, with log_completions", 10),
    copied("vllm_tensor_parallel_size", "count", "engine.tensor_parallel_size", where="colocate"),
    copied("vllm_max_model_length", "whole", "context", where="vllm"),
    copied("vllm_structured_outputs_regex", "text", "sampling.regex", None, "vllm_guided_decoding_regex", where="vllm"),
    becomes("vllm_server_base_url", "text", "engine.urls", where="server"),
    refused("fp16", "anything", "Tandem trains bfloat16 or float32; write bf16=True"),
    refused("top_entropy_quantile", "number", "every sampled token is trained", 1.0),
    refused("replay_buffer_size", "whole", "write it as replay.size of a recipe", 0),
    becomes("push_to_hub", "truth", "an upload of the trained model, as tandem push", False),
    becomes("hub_model_id", "text", "where it is uploaded to"),
    becomes("hub_private_repo", "truth", "whether that is private"),
    becomes("hub_token", "text", "the token for it"),
    becomes("project", "text", "the project of the wandb and trackio loggers"),
    becomes("trackio_space_id", "text", "the trackio logger's space"),
    refused("resume_from_checkpoint", "anything", "call trainer.train(resume_from_checkpoint=True)"),
    *(refused(name, "anything", "a checkpoint is chosen by tandem export RUN --step N")
      for name in ("load_best_model_at_end", "metric_for_best_model")),
    *(refused(name, "anything", f"ranks and shards are options of the recipe ({DOCS}/guide/distributed/)")
      for name in ("fsdp", "deepspeed", "parallelism_config")),
    refused("entropy_coef", "number", "the objective has no term for entropy", 0.0),
    refused("use_adaptive_entropy", "truth", "the objective has no term for entropy", False),
    refused("neftune_noise_alpha", "number", "the policy that is trained must be the one that sampled"),
    refused("optim_target_modules", "anything", "every trained weight has one optimizer"),
    refused("optim_args", "anything", "options of an optimizer are the recipe's"),
    refused("vllm_importance_sampling_clip_min", "number", "ratios are cut above alone"),
    becomes("model_init_kwargs", "mapping", "dtype; how attention is computed and where is Tandem's"),
    idle("max_prompt_length", "anything", "no prompt is cut"),
    *unused("anything",
        "remove_unused_columns disable_dropout shuffle_dataset log_unique_prompts use_liger_kernel "
        "use_liger_loss tf32 ds3_gather_for_generation dataloader_num_workers dataloader_pin_memory "
        "dataloader_drop_last logging_dir gradient_checkpointing_kwargs per_device_eval_batch_size "
        "num_generations_eval logging_first_step dataloader_prefetch_factor torch_compile "
        "vllm_enable_sleep_mode vllm_model_impl vllm_group_port cast_lm_head_to_fp32 disable_tqdm "
        "ddp_find_unused_parameters log_level do_train do_eval average_tokens_across_devices "
        "include_num_input_tokens_seen use_cpu data_seed log_on_each_node trust_remote_code use_cache "
        "overwrite_output_dir hub_always_push hub_revision log_completions_hub_repo log_multimodal "
        "pad_to_multiple_of cache_implementation use_transformers_continuous_batching use_transformers_paged "
        "eval_on_start eval_delay save_only_model save_on_each_node save_safetensors auto_find_batch_size "
        "torch_empty_cache_steps debug skip_memory_metrics ddp_timeout ddp_backend "
        "dataloader_persistent_workers torch_compile_backend torch_compile_mode eval_accumulation_steps "
        "full_determinism greater_is_better logging_nan_inf_filter prediction_loss_only trackio_bucket_id "
        "trackio_static_space_id label_names local_rank hub_strategy logging_strategy"),
)  # fmt: skip
"""By name, with TRL's defaults."""
