"""Flags of Atropos' example trainer, of its vLLM server and of its environments: what each becomes, or why it does not.

Of the trainer every flag is here that one of its versions had.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem_compat.table import ForeignOption, becomes, by_name, idle, refused, unused

WAYS = {
    "none": ("full", "restart"),
    "shared_vllm": ("full", "shared"),
    "lora_only": ("lora", "hotswap"),
    "lora_restart": ("lora", "restart"),
    "lora_nccl": ("lora", "broadcast"),
}
"""--weight-bridge-mode: what is trained, and how it travels."""
OPTIMIZERS = {"adamw": "adamw", "adamw_8bit": "adamw8bit", "adamw_cpu": "adamw_cpu", "adafactor": "adafactor"}
"""--optimizer: the part."""
DTYPES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float16": "bfloat16", "half": "bfloat16", "float32": "float32"}
"""--dtype: the type of the weights."""

TRAINER: Mapping[str, ForeignOption] = by_name(
    becomes("model-name", "text", "Hugging Face id or a local folder", None, ("model",), path="model"),
    becomes("env", "text", "Tandem's own: play this environment in the trainer's process", path="env"),
    becomes("group-size", "count", "Tandem's own: answers per task; left out: at most 8, by the sequences of a step"),
    becomes("vllm-url", "texts", "Tandem's own: an engine that runs already; once for each", []),
    becomes("lr", "number", "learning rate", 1e-5, path="optimizer.lr"),
    becomes("training-steps", "count", "optimizer steps", 10, path="steps"),
    becomes("batch-size", "count", "sequences of one forward and backward", 2),
    becomes("gradient-accumulation-steps", "count", "forwards and backwards of one optimizer step", 32),
    becomes("seq-len", "count", "most tokens of a prompt and its answer together", 2048, path="context"),
    becomes("warmup-steps", "whole", "steps over which the learning rate rises", 0, path="optimizer.warmup_steps"),
    becomes("clip-eps", "share", "the probability ratio is clipped to 1 - eps and 1 + eps", 0.2),
    refused("kl-coef", "number", "no loss has a penalty on the distance to the weights that sampled", 0.0),
    refused("no-reference-logprobs", "flag", "ratios are to sampling's logprobs; for a loss without: loss=reinforce",
        False),
    refused("distill-enabled", "flag", "no loss reads a teacher's distill_token_ids and distill_logprobs", False),
    becomes("distill-coef", "number", "weight of the teacher's term, which there is not", 1.0, where="distill-enabled"),
    becomes("distill-temperature", "number", "temperature of that term", 1.0, where="distill-enabled"),
    becomes("optimizer", "text", "adamw, adamw_8bit, adamw_cpu (states in host memory) or adafactor", "adamw",
        choices=OPTIMIZERS),
    becomes("adafactor-scale-parameter", "flag", "multiply the rate by each tensor's size", False, where="adafactor"),
    refused("adafactor-relative-step", "flag", "the rate is --lr, and Adafactor cannot choose it too", False),
    becomes("device", "text", "cuda, cuda:N (the Nth of CUDA_VISIBLE_DEVICES) or cpu; left out: the first GPU, if any"),
    becomes("train-layer-indices", "text", "layers trained, such as 0-3,10; default: all", where="all weights"),
    becomes("save-path", "text", "folder of step_N/, final_model/ and their like", "trained_model_checkpoints"),
    becomes("checkpoint-interval", "whole", "steps between checkpoints; 0 saves the last step alone", 3),
    becomes("weight-bridge-mode", "text", "none, shared_vllm, lora_only, lora_restart or lora_nccl", "none",
        choices=WAYS),
    idle("single-copy", "flag", "weights that are shared are always one copy"),
    becomes("vllm-config-path", "text", "the file by which a running engine lends its weights", where="shared weights"),
    becomes("use-shared-memory", "flag", "broadcast weights to an engine on another GPU", False, where="shared_vllm"),
    idle("use-cuda-ipc", "flag", "weights that are shared are always one copy"),
    becomes("vllm-port", "whole", "port of the engine, started unless one serves there", 9001, where="own engine"),
    becomes("vllm-restart-interval", "count", "steps between restarts, swaps or broadcasts", 3, where="intervals"),
    becomes("vllm-gpu", "whole", "number of the GPU of the engine; left out: the trainer's", where="own engine"),
    becomes("gpu-memory-utilization", "number", "share of the GPU's memory that the engine takes", 0.45,
        ("vllm-gpu-memory-utilization",), where="own engine", path="engine.gpu_memory_utilization"),
    becomes("max-model-len", "whole", "longest context", 4096, where="own engine", path="engine.max_model_len"),
    becomes("dtype", "text", "type of the weights; auto and float16 are bfloat16", "bfloat16", choices=DTYPES),
    becomes("lora-r", "whole", "rank of the adapter", 16, where="an adapter", path="trainable.rank"),
    becomes("lora-alpha", "whole", "the adapter's output is multiplied by alpha/r", 32, where="an adapter",
        path="trainable.alpha"),
    becomes("lora-dropout", "number", "left out: what is scored must be what sampled", 0.05, where="an adapter"),
    becomes("lora-target-modules", "texts", "adapted layers, or all-linear", ["q_proj", "v_proj"], where="an adapter"),
    becomes("lora-layer-indices", "text", "layers to adapt, such as 0-3,10; default: all", where="an adapter"),
    becomes("nccl-init-method", "text", "where trainer and engines meet", "tcp://localhost:29500", where="lora_nccl"),
    idle("nccl-world-size", "whole", "engines are counted by --vllm-url"),
    becomes("nccl-sync-every-step", "flag", "broadcast after every step, with lora_nccl", True, where="lora_nccl"),
    becomes("num-inference-nodes", "whole", "engines on other nodes, named by vllm-url", 0),
    becomes("init-method", "text", "where they meet; env:// reads MASTER_ADDR, MASTER_PORT", "env://", where="nodes"),
    refused("trainer-rank", "whole", "the trainer is one process, rank 0; start it once", 0),
    idle("world-size", "whole", "engines are counted by --vllm-url"),
    becomes("atropos-url", "text", "the broker that hands out groups", "http://localhost:8000", where="a broker"),
    becomes("use-wandb", "flag", "log to Weights & Biases", False),
    becomes("wandb-project", "text", "its project", where="use-wandb"),
    becomes("wandb-group", "text", "its group", where="use-wandb"),
    becomes("benchmark", "flag", "print times and memory at the end", False),
    idle("debug-loading", "flag", "tandem --debug shows an error's traceback"),
    becomes("log-dir", "text", "folder of the run's folder; left out: $LOGDIR, or else logs"),
)  # fmt: skip
"""Flags of the trainer."""

_TLS = "there is no TLS here; put a proxy before it"

SERVER: Mapping[str, ForeignOption] = by_name(
    becomes("model", "text", "Hugging Face id or a local folder", None, ("model-name",), path="model"),
    becomes("host", "text", "address to listen at; left out: 127.0.0.1, since the server asks for no key"),
    becomes("port", "whole", "port to listen at", 9001, path="engine.port"),
    becomes("gpu-memory-utilization", "number", "share of the GPU's memory", 0.9, path="engine.gpu_memory_utilization"),
    becomes("max-model-len", "whole", "longest context; left out: the model's own", path="context"),
    becomes("dtype", "text", "type of the weights; auto and float16 are bfloat16", "auto", choices=DTYPES),
    becomes("tensor-parallel-size", "whole", "GPUs of the engine", 1, ("-tp",), path="engine.tensor_parallel_size"),
    becomes("enable-lora", "flag", "serve adapters, as --weight-bridge-mode lora_only needs", False),
    becomes("max-lora-rank", "whole", "largest rank of an adapter", 16, where="an adapter", path="trainable.rank"),
    becomes("max-loras", "whole", "versions of an adapter that are held at once, 2 or more", 8, where="an adapter"),
    becomes("max-num-seqs", "whole", "most answers sampled at once", 256, path="engine.max_num_seqs"),
    becomes("enforce-eager", "flag", "do without CUDA graphs", False, path="engine.enforce_eager"),
    becomes("seed", "whole", "where sampling's random numbers begin", 0, path="seed"),
    *(refused(f"ssl-{name}", "text", _TLS) for name in ("keyfile", "certfile", "ca-certs")),
    *unused("text", "log-level root-path"),
    *unused("whole", "ssl-cert-reqs"),
    *unused("flag", "enable-ssl-refresh"),
)  # fmt: skip
"""Flags of the server; every other one is handed to vLLM."""


ENVIRONMENT: Mapping[str, ForeignOption] = by_name(
    becomes("env.group_size", "whole", "answers sampled per task", 4, path="group_size"),
    becomes("env.max_num_workers", "whole", "groups played at once; -1: max_num_workers_per_node for each engine", -1),
    becomes("env.max_num_workers_per_node", "whole", "groups played at once for each engine", 8),
    becomes("env.max_token_length", "whole", "most tokens of a prompt and its answer together", 2048, path="context"),
    becomes("env.max_batches_offpolicy", "whole", "batches that may be queued before the environment pauses", 3),
    becomes("env.total_steps", "whole", "steps of the trainer after which to end; -1: all that it takes", 1000),
    becomes("env.tokenizer_name", "text", "Hugging Face id or folder of the tokenizer; left out: the engine's"),
    becomes("env.rollout_server_url", "text", "the broker", "http://localhost:8000", path="broker"),
    becomes("env.ensure_scores_are_not_same", "truth", "leave out groups whose scores are all equal", True),
    becomes("env.min_batch_allocation", "number", "least share of every batch, 0 to 1", path="min_share"),
    becomes("env.inference_weight", "positive", "share against other environments'", 1.0, path="weight"),
    becomes("env.worker_timeout", "number", "seconds one group may take; -1: no limit", 600.0),
    becomes("env.wandb_name", "text", "name at the broker; left out: the environment's", path="known_as"),
    idle("env.batch_size", "whole", "the trainer says how large its batches are", off=(-1,)),
    becomes("openai.base_url", "text", "the engine; several are separated by commas", "http://localhost:9001/v1"),
    becomes("openai.model_name", "text", "what the engine calls the model; default, and left out: as the tokenizer"),
    becomes("openai.tokenizer_name", "text", "tokenizer of the engine's model, where env.tokenizer_name does not say"),
    becomes("openai.api_key", "text", "the engine's API key", ""),
    becomes("openai.server_type", "text", "vllm or openai; which it is, is found out", "vllm"),
    becomes("openai.timeout", "number", "seconds one answer may take", 1200.0, path="engine.request_seconds"),
    refused("env.teacher_enabled", "truth", "no loss reads a teacher's logprobs", False),
    becomes("config", "text", "YAML file with the sections env and openai; flags go before it"),
    refused("slurm", "truth", "name the engines by --openai.base_url", False),
    refused("testing", "truth", "there is no pretended engine; run a real one: tandem serve engine RECIPE", False),
    idle("env.use_wandb", "truth", "the trainer logs; this environment does not", off=(False,)),
    *unused("truth", "env.include_messages"),
    *unused("text",
        "env.steps_per_eval env.max_eval_workers env.num_rollouts_to_keep env.num_rollouts_per_group_for_logging "
        "env.min_items_sent_before_logging env.teacher_top_k env.eval_handling env.eval_limit_ratio "
        "env.data_dir_to_save_evals env.data_path_to_save_groups openai.num_max_requests_at_once "
        "openai.num_requests_for_eval openai.rolling_buffer_length openai.n_kwarg_is_ignored openai.health_check "
        "openai.tracing_enabled teacher.base_url teacher.model_name teacher.server_type teacher.tokenizer_name"),
)  # fmt: skip
"""Flags of the environments, such as ``gsm8k_server.py serve --env.group_size 8``."""
