"""Every argument of ms-swift's GRPO and of its engine's commands: what it becomes, or why it does not.

Where the text of an argument's ``becomes`` says what it is in a recipe, ``_swift_recipe`` does so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tandem.types import Json

Takes = Literal["text", "whole", "number", "truth", "texts", "numbers", "mapping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument. Of ``becomes``, ``idle`` and ``refused`` exactly one is there."""

    name: str
    """Its name, without dashes."""
    becomes: str = ""
    """What it is in a recipe."""
    idle: str = ""
    """Why it changes nothing here, which is told where it is given."""
    refused: str = ""
    """Why it is refused where it asks for something."""
    takes: Takes = "text"
    """What its value is; texts and numbers are several."""
    default: Json = None
    """Its value where it is left out; of an idle or refused one, the value that asks for nothing."""
    where: str = ""
    """What it belongs to, by a name that ``Reading`` knows; given elsewhere it is refused. Empty: it always counts."""
    also: tuple[str, ...] = ()
    """Older names."""

    @property
    def help(self) -> str:
        """One line for --help."""
        if self.becomes:
            left_out = "" if self.default in (None, False) else f" Default: {self.default}."
            return f"{self.becomes[0].upper()}{self.becomes[1:]}.{left_out}"
        return f"Changes nothing: {self.idle}." if self.idle else f"Refused: {self.refused}."


def _is(name: str, takes: Takes, becomes: str, default: Json = None, *also: str, where: str = "") -> Argument:
    return Argument(name=name, takes=takes, becomes=becomes, default=default, also=also, where=where)


def _idle(name: str, takes: Takes, why: str, *also: str, where: str = "", default: Any = None) -> Argument:
    return Argument(name=name, takes=takes, idle=why, also=also, where=where, default=default)


def _no(name: str, takes: Takes, why: str, default: Any = None, *also: str) -> Argument:
    return Argument(name=name, takes=takes, refused=why, default=default, also=also)


_ONE = "the trainer is one process; memory: fit, micro_batch_tokens and offload_optimizer lower its memory"
_READ = "the model's folder says so"
_ROWS = "rows are read once, when a run starts"
_OWN = "Tandem has an attention, packing and kernels of its own"
_GONE = "the engine's weights are the trainer's, so there is no second copy to move or release"
_QUANTISED = "Tandem trains bfloat16 or float32 weights"
_LORA = "Tandem trains PEFT's plain LoRA"
_TURNS = "gyms are played by an environment (docs/environments.md), or write a scheduler (multi_turn_scheduler)"
_PLAYED = "the trainer plays, so give it to tandem swift rlhf"
_RESUME = "to go on with a run: tandem train RUN"
_SWANLAB = "numbers go to metrics.jsonl of the run's folder, and to wandb, trackio or tensorboard where named"

ENGINE: tuple[Argument, ...] = (
    _is("vllm_gpu_memory_utilization", "number", "engine.gpu_memory_utilization", None, "gpu_memory_utilization",
        where="colocate"),
    _is("vllm_tensor_parallel_size", "whole", "engine.tensor_parallel_size", 1, "tensor_parallel_size",
        where="colocate"),
    _is("vllm_max_model_len", "whole", "engine.max_model_len", None, "max_model_len", where="colocate"),
    _is("vllm_max_num_seqs", "whole", "engine.max_num_seqs", 256, "max_num_seqs", where="colocate"),
    _is("vllm_enforce_eager", "truth", "engine.enforce_eager", False, "enforce_eager", where="colocate"),
    _is("vllm_limit_mm_per_prompt", "mapping", "engine.limit_mm_per_prompt", None, "limit_mm_per_prompt",
        where="colocate"),
    _is("vllm_enable_prefix_caching", "truth", "engine.enable_prefix_caching", True, "enable_prefix_caching",
        where="colocate"),
    _is("vllm_enable_lora", "truth", "trains.merged: false, so that the adapter travels and not the sum", False,
        where="vllm"),
    _is("vllm_engine_kwargs", "mapping", "engine.args", None, where="colocate"),
    _is("vllm_disable_custom_all_reduce", "truth", "engine.args.disable_custom_all_reduce", False,
        "disable_custom_all_reduce", where="colocate"),
    _is("vllm_disable_cascade_attn", "truth", "engine.args.disable_cascade_attn", False, where="colocate"),
    _is("vllm_enable_expert_parallel", "truth", "engine.args.enable_expert_parallel", False, where="colocate"),
    _is("vllm_max_logprobs", "whole", "engine.args.max_logprobs", None, "max_logprobs", where="colocate"),
    _no("vllm_pipeline_parallel_size", "whole", "an engine is split by tensor_parallel_size alone", 1),
    _no("vllm_quantization", "text", _QUANTISED + ", and the engine samples from them"),
    _no("vllm_speculative_config", "text", "its drafts are not versioned with the policy"),
)  # fmt: skip
"""Options of vLLM that both commands have."""

_BASE: tuple[Argument, ...] = (
    _is("model", "text", "model", None, "model_id_or_path"),
    _is("torch_dtype", "text", "dtype: bfloat16 or float32", "bfloat16", "dtype"),
    _is("seed", "whole", "seed", 42),
    _is("max_length", "whole", "context, with max_completion_length added"),
    _idle("model_type", "text", _READ),
    _idle("template", "text", "the tokenizer's chat template is used; chat_template names another"),
    _idle("task_type", "text", "it is always causal_lm", default="causal_lm"),
    _idle("use_hf", "truth", "models and data sets that are not on this machine come from the Hugging Face hub"),
    _idle("check_model", "truth", "safetensors files are read whole or not at all"),
    _idle("attn_impl", "text", _OWN),
    _no("adapters", "texts", "merge the adapter first and name the folder as model"),
    _no("quant_method", "text", _QUANTISED),
    _no("quant_bits", "whole", _QUANTISED),
    _no("model_revision", "text", "download that revision and name its folder as model"),
)  # fmt: skip

_LEARNING: tuple[Argument, ...] = (
    _is("rlhf_type", "text", "nothing: it must be grpo", "grpo"),
    _is("train_type", "text", "trains: lora or full", "lora", "tuner_type", "sft_type"),
    _is("per_device_train_batch_size", "whole",
        "groups_per_step: this x gradient_accumulation_steps / num_generations", 1),
    _is("gradient_accumulation_steps", "whole", "groups_per_step", 1),
    _is("mini_batch_size", "whole", "micro_batch_tokens, which a step's memory is bounded by, with max_length"),
    _is("generation_batch_size", "whole", "sync.every and max_lag: steps that one round of generation is for"),
    _is("steps_per_generation", "whole", "sync.every and max_lag"),
    _is("num_generations", "whole", "group_size", 8),
    _is("num_train_epochs", "number", "steps, by the rows of the data", 3.0),
    _is("max_steps", "whole", "steps", -1),
    _is("learning_rate", "number", "optimizer.lr; default 1e-4 for an adapter, 1e-5 for all weights"),
    _is("lr_scheduler_type", "text", "optimizer.schedule", "cosine"),
    _is("lr_scheduler_kwargs", "mapping", "optimizer.min_lr_ratio: min_lr or min_lr_rate"),
    _is("warmup_ratio", "number", "optimizer.warmup_steps, as a share of steps", 0.0),
    _is("warmup_steps", "whole", "optimizer.warmup_steps", 0),
    _is("weight_decay", "number", "optimizer.weight_decay", 0.1),
    _is("adam_beta1", "number", "optimizer.beta1", 0.9),
    _is("adam_beta2", "number", "optimizer.beta2", 0.95),
    _is("adam_epsilon", "number", "optimizer.eps", 1e-8),
    _is("max_grad_norm", "number", "optimizer.max_grad_norm", 1.0),
    _is("optim", "text", "optimizer", "adamw_torch_fused"),
    _is("offload_optimizer", "truth", "optimizer: adamw_cpu, whose states are always in host memory", False),
    _is("gradient_checkpointing", "truth", "checkpointing: full or none", True),
    _is("beta", "number", "reference: start with this beta; 0: none", 0.04),
    _is("epsilon", "number", "loss.clip_low", 0.2, where="clipped"),
    _is("epsilon_high", "number", "loss.clip_high; of cispo its cap; default: epsilon", where="clipped high"),
    _is("delta", "number", "loss.dual_clip", where="grpo's loss"),
    _is("tau_pos", "number", "loss.temperature_positive", 1.0, where="sapo"),
    _is("tau_neg", "number", "loss.temperature_negative", 1.05, where="sapo"),
    _is("loss_type", "text", "loss.reduction: grpo sequence, bnpo and dapo token, dr_grpo constant; or cispo, sapo",
        "grpo"),
    _is("importance_sampling_level", "text", "loss: grpo for token, gspo for sequence", "token", where="ratio"),
    _is("advantage_estimator", "text", "advantage: grpo or rloo", "grpo"),
    _is("scale_rewards", "text", "advantage: group is grpo, batch batch_std, none dr_grpo, gdpo gdpo"),
    _is("num_iterations", "whole", "updates", 1),
    _is("rollout_importance_sampling_mode", "text", "corrections, and old_logprobs: recomputed"),
    _is("rollout_importance_sampling_threshold", "number", "corrections.high", 2.0, where="correction"),
    _is("sync_ref_model", "truth", "reference: average", False, where="reference"),
    _is("ref_model_mixup_alpha", "number", "reference.mixup", 0.6, where="average"),
    _is("ref_model_sync_steps", "whole", "reference.every", 512, where="average"),
    _is("ref_model", "text", "nothing: it must be model, with which a run begins", where="reference"),
    _is("lora_rank", "whole", "trains.rank", 8, where="lora"),
    _is("lora_alpha", "whole", "trains.alpha", 32, where="lora"),
    _is("target_modules", "texts", "trains.target_modules", ["all-linear"], where="lora"),
    _is("kl_in_reward", "truth", "nothing: it must be false, also with rloo, whose default is true: the penalty is a "
        "term of the loss"),
    _is("off_policy_sequence_mask_delta", "number", "corrections: opsm with this threshold"),
    _no("sequence_parallel_size", "whole", _ONE, 1),
    _no("ref_adapters", "texts", "merge the adapter first and name the folder as model"),
    _no("tuner_backend", "text", _LORA, "peft"),
    _is("loss_scale", "text", "nothing: last_round or default; either trains every sampled token", "last_round"),
    _no("top_entropy_quantile", "number", "every sampled token is trained", 1.0),
    _no("use_dora", "truth", _LORA, False),
    _no("use_rslora", "truth", "write the lora_alpha that it comes to: lora_alpha x sqrt(lora_rank)", False),
    _no("lora_bias", "text", _LORA, "none"),
    _no("modules_to_save", "texts", _LORA),
    _no("target_regex", "text", _LORA + ", by names in target_modules"),
    _no("lorap_lr_ratio", "number", _LORA),
    _no("init_weights", "text", _LORA, "true"),
    _no("freeze_parameters", "texts", "trains.layers names what is trained"),
    _no("freeze_parameters_ratio", "number", "trains.layers names what is trained", 0.0),
    _no("trainable_parameters", "texts", "trains.layers names what is trained"),
    _idle("lora_dropout", "number", "Tandem has no dropout: the policy that is scored must be the one that sampled",
        where="lora", default=0.0),
    _idle("lora_dtype", "text", "an adapter has its model's type, with float32 masters", where="lora"),
    _idle("freeze_vit", "truth", "there are no images"),
    _idle("freeze_llm", "truth", "there are no images"),
    _idle("freeze_aligner", "truth", "there are no images"),
    _idle("deepspeed", "text", _ONE),
    _idle("fsdp", "text", _ONE),
    _idle("ddp_find_unused_parameters", "truth", _ONE),
    _idle("ds3_gather_for_generation", "truth", _ONE),
    _idle("ddp_backend", "text", _ONE),
    _idle("ddp_timeout", "whole", "every wait has a deadline of its own"),
    _idle("gradient_checkpointing_kwargs", "mapping", "checkpointing is Tandem's own"),
    _idle("padding_free", "truth", _OWN),
    _idle("packing", "truth", _OWN),
    _idle("use_liger_kernel", "truth", _OWN),
    _idle("use_logits_to_keep", "truth", _OWN),
    _idle("bf16", "truth", "torch_dtype says so"),
    _no("fp16", "truth", _QUANTISED, False),
    _idle("log_entropy", "truth", "entropy is always among the metrics"),
    _idle("log_rollout_offpolicy_metrics", "truth", "they are always among the metrics"),
)  # fmt: skip

_DATA: tuple[Argument, ...] = (
    _is("dataset", "texts", "env, or with several envs: files or names on the hub; path#N takes the first N rows"),
    _is("val_dataset", "texts", "env.test_path"),
    _is("split_dataset_ratio", "number", "env.test_share", 0.0),
    _is("system", "text", "env.system: a text, or a .txt file of it"),
    _is("eval_steps", "number", "evaluate.every; below 1 a share of steps", where="evaluation"),
    _is("num_generations_eval", "whole", "evaluate.samples; default: num_generations", where="evaluation"),
    _is("reward_funcs", "texts", "rewards: accuracy, format, cosine, repetition, soft_overlong, or of external_plugins",
        []),
    _is("reward_weights", "numbers", "rewards.*.weight; reward models come last"),
    _is("external_plugins", "texts", "where names of reward_funcs are looked up", [], "plugin", "custom_register_path"),
    _is("reward_model", "texts", "rewards: reward_model", []),
    _is("reward_model_plugin", "texts", "nothing: it must be default, the model's own output", where="reward model"),
    _is("cosine_min_len_value_wrong", "number", "rewards.cosine.wrong_short", -0.5, where="cosine"),
    _is("cosine_max_len_value_wrong", "number", "rewards.cosine.wrong_long", 0.0, where="cosine"),
    _is("cosine_min_len_value_correct", "number", "rewards.cosine.right_short", 1.0, where="cosine"),
    _is("cosine_max_len_value_correct", "number", "rewards.cosine.right_long", 0.5, where="cosine"),
    _is("cosine_max_len", "whole", "rewards.cosine.max_tokens; default: max_completion_length", where="cosine"),
    _is("repetition_n_grams", "whole", "rewards.repetition.ngram", 3, where="repetition"),
    _is("repetition_max_penalty", "number", "rewards.repetition.weight, its sign turned", -1.0, where="repetition"),
    _is("soft_max_length", "whole", "rewards.soft_overlong.max_tokens; default: max_completion_length",
        where="soft_overlong"),
    _is("soft_cache_length", "whole", "rewards.soft_overlong.cache", where="soft_overlong"),
    _is("truncation_strategy", "text", "nothing: a prompt without room is an error", "raise"),
    _is("columns", "mapping", "env.columns: names in the data, and what they are called here"),
    _idle("reward_model_type", "texts", _READ, where="reward model"),
    _no("reward_model_revision", "texts", "download that revision and name its folder as reward_model"),
    _no("reward_adapters", "texts", "merge the adapter first and name the folder as reward_model"),
    _no("dataset_shuffle", "truth", "tasks are always drawn in a shuffled order", True),
    _no("streaming", "truth", _ROWS, False),
    _idle("dataset_num_proc", "whole", _ROWS),
    _idle("dataloader_num_workers", "whole", _ROWS),
    _idle("dataloader_pin_memory", "truth", _ROWS),
    _idle("load_from_cache_file", "truth", _ROWS),
    _idle("lazy_tokenize", "truth", _ROWS),
    _idle("strict", "truth", "a wrong row is always an error"),
    _idle("data_seed", "whole", "seed fixes the order of tasks, too"),
    _idle("remove_unused_columns", "truth", "rewards get every column by name"),
    _idle("per_device_eval_batch_size", "whole", "evaluation asks the engine as training does"),
)  # fmt: skip

_SAMPLING: tuple[Argument, ...] = (
    _is("max_completion_length", "whole", "sampling.max_tokens", 512, "max_new_tokens", "response_length"),
    _is("enable_thinking", "truth", "chat_template_kwargs.enable_thinking"),
    _is("temperature", "number", "sampling.temperature", 0.9),
    _is("top_p", "number", "sampling.top_p", 1.0),
    _is("top_k", "whole", "sampling.top_k", -1),
    _is("min_p", "number", "sampling.min_p", 0.0),
    _is("repetition_penalty", "number", "sampling.repetition_penalty", 1.0),
    _is("stop_words", "texts", "sampling.stop", []),
    _is("dynamic_sample", "truth", "flat_groups: drop", False),
    _is("max_resample_times", "whole", "max_resample_times", 3, where="dynamic_sample"),
    _is("overlong_filter", "truth", "truncated: mask", False),
    _is("use_vllm", "truth", "engine: vllm; else embedded", False),
    _is("vllm_mode", "text", "colocate: an engine started here; server: one that runs already", where="vllm"),
    _is("vllm_server_host", "texts", "engine.urls", where="server"),
    _is("vllm_server_port", "texts", "engine.urls", ["8000"], where="server"),
    _is("vllm_server_base_url", "texts", "engine.urls", where="server"),
    _is("vllm_server_timeout", "number", "engine.start_seconds: how long it may not be there yet", 120.0,
        where="server"),
    _is("async_generate", "truth", "max_lag: 1 more", False, where="vllm"),
    _is("vllm_device", "texts", "engine.devices, such as cuda:1; auto: the last ones that the trainer leaves",
        where="colocate"),
    _is("num_infer_workers", "whole", "engine.devices, with vllm_device auto: so many", where="colocate"),
    _is("sleep_level", "whole", "engine.sleep, where vllm_tensor_parallel_size is above 1; else " + _GONE, 0,
        where="colocate"),
    _idle("vllm_server_group_port", "texts", "the engine says at which port weights reach it", where="server"),
    _idle("enable_flattened_weight_sync", "truth", "weights always travel in large pieces", where="vllm"),
    _idle("vllm_max_lora_rank", "whole", "the engine is told the adapter's own rank", where="colocate"),
    _idle("vllm_mm_processor_cache_gb", "number", "there are no images", where="colocate"),
    _idle("move_model_batches", "whole", _GONE, where="colocate"),
    _idle("offload_model", "truth", _GONE, where="colocate"),
    _idle("gc_collect_after_offload", "truth", _GONE, where="colocate"),
    _is("structured_outputs_regex", "text", "sampling.regex", None, "vllm_structured_outputs_regex", where="vllm"),
    _is("multi_turn_scheduler", "text", "env: conversations that a scheduler of external_plugins goes on with"),
    _is("max_turns", "whole", "env.max_turns", where="scheduler"),
    _no("multi_turn_func", "text", "write a scheduler (multi_turn_scheduler)"),
    _no("agent_template", "text", "tools are written by the tokenizer's chat template", None, "tools_prompt"),
    _no("use_gym_env", "truth", _TURNS, False),
    _idle("vllm_server_pass_dataset", "truth", "rewards and schedulers get every column by name"),
    _no("gym_env", "text", _TURNS),
    _no("use_lmdeploy", "truth", "engines are embedded and vllm", False),
)  # fmt: skip

_RUN: tuple[Argument, ...] = (
    _is("output_dir", "text", "runs, the folder of the run's folder; default: output/ and the model's name"),
    _is("add_version", "truth", "name: false makes output_dir the run's folder itself", True),
    _is("save_steps", "number", "checkpoint.every; below 1 a share of steps", 500),
    _is("save_total_limit", "whole", "checkpoint.keep; default: all"),
    _is("save_strategy", "text", "checkpoint.every: epoch saves after each, no the last step alone", "steps"),
    _is("log_completions", "truth", "sinks: completions.jsonl in the run's folder", True),
    _is("report_to", "texts", "sinks: tensorboard, wandb or trackio", []),
    _is("run_name", "text", "name"),
    _idle("wandb_log_unique_prompts", "truth", "every rollout is in the run's folder"),
    _no("resume_from_checkpoint", "text", _RESUME),
    _no("push_to_hub", "truth", "tandem export makes a folder to upload", False),
    _is("eval_strategy", "text", "evaluate.every: steps by eval_steps, epoch after each; no: none", "steps"),
    *(_idle(f"swanlab_{name}", "text", _SWANLAB) for name in ("project", "workspace", "exp_name", "mode")),
    _no("load_best_model_at_end", "truth", "every checkpoint is kept: tandem export RUN DEST --step N", False),
    _idle("logging_steps", "number", "every step is written down"),
    _idle("logging_first_step", "truth", "every step is written down"),
    _idle("logging_dir", "text", "sinks write into the run's folder"),
    _idle("save_only_model", "truth", "a checkpoint is what a run goes on from"),
    _idle("create_checkpoint_symlink", "truth", "checkpoints bear their step as name"),
    _idle("ignore_args_error", "truth", "no wrong argument is ignored"),
)

RLHF: tuple[Argument, ...] = (*_BASE, *_DATA, *_LEARNING, *_SAMPLING, *ENGINE, *_RUN)
"""Of ``swift rlhf --rlhf_type grpo``."""

DEPLOY: tuple[Argument, ...] = (
    *(argument for argument in _BASE if argument.name != "max_length"),
    *ENGINE,
    _is("max_length", "whole", "context"),
    _is("host", "text", "engine.host", "0.0.0.0"),
    _is("port", "whole", "engine.port", 8000),
    _is("vllm_max_lora_rank", "whole", "trains.rank of the adapter that will be trained", 16, where="adapter"),
    _is("target_modules", "texts", "trains.target_modules of the adapter that will be trained", ["all-linear"],
        where="adapter"),
    _is("vllm_data_parallel_size", "whole", "engine.replicas, at this port and the next ones", 1, "data_parallel_size"),
    _is("api_key", "text", "engine.api_key_variable"),
    _is("infer_backend", "text", "nothing: it must be vllm", "vllm"),
    _no("served_model_name", "text", "an engine is known by its model, which is what a trainer asks for"),
    _idle("multi_turn_scheduler", "text", _PLAYED),
    _idle("max_turns", "whole", _PLAYED),
    _no("use_gym_env", "truth", _TURNS, False),
    _idle("external_plugins", "texts", _PLAYED, "plugin", "custom_register_path"),
    _idle("max_new_tokens", "whole", "a trainer says how long answers may be"),
    _idle("temperature", "number", "a trainer says how it samples"),
    _idle("vllm_use_async_engine", "truth", "it always is", "use_async_engine"),
    _idle("log_interval", "whole", "vLLM's own log has it"),
    _idle("verbose", "truth", "vLLM's own log has it"),
)  # fmt: skip
"""Of ``swift deploy`` and ``swift rollout``."""
