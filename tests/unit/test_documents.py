"""Every example for one GPU of Axolotl's and ms-swift's documents, as they write it: it loads, its parts go together.

Models and data are a test's own. What an example says of several GPUs is left out, but for what an engine is told.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.compat import swift
from tandem.compat.swift.options import DEPLOY, RLHF
from tandem.config.loading import from_options, load
from tandem.trainer.assemble import check_pairs

# Axolotl

START = """
base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
chat_template: tokenizer_default
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.85, dtype: auto, max_model_len: 2048}
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
trl:
  use_vllm: true
  use_data_producer: true
  vllm_server_host: 0.0.0.0
  vllm_server_port: 8000
  vllm_server_timeout: 300
  vllm_lora_sync: true
  num_generations: 8
  max_completion_length: 512
  temperature: 0.7
  reward_funcs: [rewards.accuracy_reward, rewards.format_reward]
  reward_weights: [1.0, 0.5]
datasets: [{path: rows.jsonl, name: main, type: rewards.prompt_transform, split: train}]
skip_prepare_dataset: true
val_set_size: 0.0
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 200
learning_rate: 5.0e-6
optimizer: adamw_torch_fused
lr_scheduler: cosine
warmup_steps: 10
bf16: true
attn_implementation: flash_attention_2
gradient_checkpointing: true
special_tokens: {pad_token: "<|endoftext|>"}
output_dir: ./grpo-output
logging_steps: 1
"""
"""The quick start."""

SHORT = """
base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
trl: {reward_funcs: [rewards.accuracy_reward], num_generations: 4}
datasets: [{path: rows.jsonl, type: rewards.prompt_transform}]
micro_batch_size: 4
learning_rate: 1e-5
max_steps: 4
"""
"""What examples that are a part of a file leave out."""

BLOCKS: dict[str, tuple[str, str]] = {
    "quick start": (START, ""),
    "three rewards": (START, """
trl:
  reward_funcs: [rewards.accuracy_reward, rewards.format_reward, rewards.length_penalty]
  reward_weights: [1.0, 0.5, 0.1]
"""),
    "aggregation": (START, "trl: {multi_objective_aggregation: normalize_then_sum}"),
    "reward model": (START, """
trl:
  reward_funcs: [OpenAssistant/reward-model-deberta-v3-large-v2, rewards.format_reward]
  reward_weights: [1.0, 0.3]
"""),
    "workers": (START, "trl: {reward_num_workers: 4}"),
    "minimal server": (START, """
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.85}
trl: {use_vllm: true, vllm_lora_sync: true, vllm_sync_interval: 5}
"""),
    "prefetch": (START, """
trl: {use_data_producer: true, async_prefetch: true, prefetch_depth: 1, vllm_sync_interval: 2}
"""),
    "streaming": (START, "trl: {streaming_partial_batch: true, streaming_min_groups: 1}"),
    "skipping": (START, "trl: {skip_zero_advantage_batches: true}"),
    "replay": (START, "trl: {replay_buffer_size: 100, replay_recompute_logps: true}"),
    "stale replay": (START, "trl: {replay_buffer_size: 100, replay_recompute_logps: false}"),
    "round of two steps": (START, "trl: {generation_batch_size: 16}"),
    "reroll": (START, "trl: {reroll_start_fraction: 0.5, reroll_max_groups: 1}"),
    "correction": (START, """
trl: {vllm_importance_sampling_correction: true, importance_sampling_level: token, off_policy_mask_threshold: 0.5}
"""),
    "fp8": (START, "{fp8: true, torch_compile: true}"),
    "use_reentrant": (START, "gradient_checkpointing_kwargs: {use_reentrant: true}"),
    "dr_grpo": (START, "trl: {loss_type: dr_grpo, max_completion_length: }"),
    "random reward": (SHORT, """
trl:
  beta: 0.001
  max_completion_length: 256
  use_vllm: True
  num_generations: 4
  reward_funcs: ["rewards.rand_reward_func"]
  reward_weights: [1.0]
datasets: [{path: rows.jsonl, name: main, type: rewards.oai_gsm8k_transform}]
"""),
    "rollout function": (SHORT, """
trl:
  beta: 0.001
  max_completion_length: 512
  num_generations: 4
  rollout_func: "rewards.math_solver_rollout"
  reward_funcs: ["rewards.math_reward"]
  reward_weights: [1.0]
datasets: [{path: rows.jsonl, name: main, type: rewards.math_transform}]
"""),
    "full async": ("", """
base_model: Qwen/Qwen2.5-1.5B-Instruct
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.35, dtype: auto}
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
rl: grpo
trl:
  use_data_producer: true
  use_vllm: true
  async_prefetch: true
  prefetch_depth: 1
  vllm_sync_interval: 2
  vllm_lora_sync: true
  streaming_partial_batch: true
  vllm_importance_sampling_correction: true
  off_policy_mask_threshold: 0.5
  importance_sampling_level: token
  num_generations: 8
  max_completion_length: 512
  reward_funcs: [rewards.accuracy_reward]
  reroll_start_fraction: 0.5
  replay_buffer_size: 100
  reward_num_workers: 4
  skip_zero_advantage_batches: true
datasets: [{path: rows.jsonl, type: rewards.prompt_transform, split: train}]
gradient_accumulation_steps: 4
micro_batch_size: 2
max_steps: 500
learning_rate: 1e-5
bf16: true
gradient_checkpointing: true
"""),
    "gdpo": (SHORT, """
rl: gdpo
vllm: {host: 0.0.0.0, port: 8000, tensor_parallel_size: 2, gpu_memory_utilization: 0.85}
trl:
  beta: 0.001
  max_completion_length: 256
  use_vllm: true
  num_generations: 4
  reward_funcs: [rewards.format_reward, rewards.correctness_reward]
  reward_weights: [1.0, 2.0]
datasets: [{path: rows.jsonl, name: main, type: rewards.oai_gsm8k_transform}]
"""),
    "a server": (SHORT, """
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.85, dtype: auto, max_model_len: 4096}
trl: {use_vllm: true, vllm_server_host: 0.0.0.0, vllm_server_port: 8000, vllm_server_timeout: 300}
"""),
    "two GPUs for vLLM": (SHORT, """
vllm: {tensor_parallel_size: 2, gpu_memory_utilization: 0.85}
trl: {use_vllm: true}
"""),
    "colocate": (SHORT, "trl: {use_vllm: true, vllm_mode: colocate, vllm_enable_sleep_mode: true}"),
    "LoRA sync": (SHORT, """
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
trl: {use_vllm: true, vllm_lora_sync: true, vllm_sync_interval: 5}
"""),
    "sync interval": (SHORT, "trl: {use_vllm: true, vllm_sync_interval: 5}"),
    "local files": (SHORT, """
datasets: [{path: json, ds_type: json, data_files: [rows.jsonl], split: train, type: rewards.prompt_transform}]
"""),
}  # fmt: skip
"""By what it shows: the file that it belongs to, and the block."""

MODULE = """
import random

def accuracy_reward(completions, answer, **kwargs) -> list[float]:
    return [float(gold in completion[0]["content"]) for completion, gold in zip(completions, answer)]

def format_reward(completions, **kwargs) -> list[float]:
    return [sum(c.isalpha() for c in completion[0]["content"]) / 10 for completion in completions]

def length_penalty(completions, **kwargs) -> list[float]:
    return [-len(completion[0]["content"]) / 100 for completion in completions]

def rand_reward_func(completions, **kwargs) -> list[float]:
    return [random.uniform(0, 1) for _ in completions]

def correctness_reward(completions, answers, **kwargs) -> list[float]:
    return [float(gold in completion[0]["content"]) for completion, gold in zip(completions, answers)]

def prompt_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": example["answer"]}
    return transform_fn, {"remove_columns": ["question"]}

oai_gsm8k_transform = prompt_transform

def math_transform(cfg, *args, **kwargs):
    def transform_fn(example, processing_class=None):
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": str(example["answer"])}
    return transform_fn, {"remove_columns": ["question"]}

def math_reward(prompts, completions, answers, **kwargs):
    return [float(gold in text) + text.count("e") / 10 for text, gold in zip(completions, answers)]

def math_solver_rollout(model, processing_class, prompts, generation_config=None):
    completions = []
    for prompt in prompts:
        opening = processing_class.apply_chat_template(
            prompt.get("messages", []), processing_class=False, add_generation_prompt=True
        )
        said = ""
        for step in range(3):
            inputs = processing_class(opening + said + "\\nNext step:", return_tensors="pt").to(model.device)
            outputs = model.generate(**inputs, max_new_tokens=8, generation_config=generation_config)
            text = processing_class.decode(outputs[0][inputs.input_ids.shape[1]:], skip_special_tokens=True)
            said += text + "\\n"
            if "FINAL" in text:
                break
        completions.append(said)
    return completions
"""
"""A module with the functions that the examples name: their signatures are the documents'."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards.py").write_text(MODULE)
    rows = [{"question": f"{n}+2=", "answer": str(n + 2)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def laid(under: Any, over: Any) -> Any:
    """A block laid over the file that it belongs to."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return {**under, **{name: laid(under.get(name), value) for name, value in over.items()}}


def written(what: str) -> str:
    """An example's file."""
    file, block = BLOCKS[what]
    return yaml.safe_dump(laid(yaml.safe_load(file), yaml.safe_load(block) or {}), sort_keys=False) if file else block


@pytest.mark.slow
@pytest.mark.parametrize("what", BLOCKS)
def test_axolotls_examples(what: str, here: Path) -> None:
    text = written(what)
    (here / "config.yaml").write_text(text)
    check_pairs(load(here / "config.yaml", ELSEWHERE.get(what, ())).config)
    if yaml.safe_load(text)["trl"].get("use_vllm") and what != "colocate":
        check_pairs(load(here / "config.yaml", ELSEWHERE.get(what, ()), serving=True).config)


ELSEWHERE = {
    "fp8": ("matmul=dtype",),
    "a mixture of experts": ("engine.sleep=0",),
    "vLLM over four GPUs": ("engine.sleep=0",),
}
"""By example: overrides of what a test's machine may lack, torchao or an accelerator."""

# ms-swift

_USUAL = "--load_from_cache_file true --dataloader_num_workers 4 --dataset_num_proc 4 --torch_dtype bfloat16"
_OLD = "--torch_dtype bfloat16 --dataloader_num_workers 4 --dataset_num_proc 4 --system examples/train/grpo/prompt.txt"
_SERVER = "--use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 8000"
_SMALL = "--lora_rank 8 --lora_alpha 32 --target_modules all-linear"
_SINGLE = (
    f"{_OLD} {_SMALL} --dataset rows.jsonl#1000 --max_completion_length 1024 --num_train_epochs 1 --eval_steps 100 "
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --learning_rate 1e-5 --num_generations 4 "
    "--gradient_accumulation_steps 1 --save_steps 100 --save_total_limit 2 --logging_steps 5 --max_length 2048 "
    "--output_dir output --warmup_ratio 0.05 --temperature 0.9 --log_completions true"
)
_LARGE = (
    f"{_USUAL} --dataset rows.jsonl#1000 --split_dataset_ratio 0 --max_completion_length 2048 --num_train_epochs 3 "
    "--learning_rate 1e-6 --save_total_limit 2 --logging_steps 1 --warmup_ratio 0.05 --num_generations 8 "
    "--temperature 1.0 --top_p 0.9 --top_k 50 --deepspeed zero3 --log_completions true --num_iterations 1 "
    "--report_to tensorboard wandb"
)
_MOE = (
    "--torch_dtype bfloat16 --dataset rows.jsonl#1000 --max_length 12000 --max_completion_length 8192 "
    "--overlong_filter true --num_train_epochs 1 --learning_rate 1e-6 --save_strategy steps --eval_strategy steps "
    "--eval_steps 1000 --save_steps 1000 --save_total_limit 10 --logging_steps 1 --warmup_ratio 0.01 --beta 0.001 "
    "--dataloader_num_workers 4 --temperature 1.0 --deepspeed zero3_offload --log_completions true --num_iterations 1 "
    "--report_to tensorboard swanlab --reward_funcs accuracy --per_device_train_batch_size 1"
)
_SEEN = (
    "--torch_dtype bfloat16 --system examples/train/grpo/prompt.txt --num_train_epochs 1 --output_dir output "
    "--save_total_limit 2 --logging_steps 5 --warmup_ratio 0.05 --dataloader_num_workers 4 --max_length 2048 "
    "--dataset rows.jsonl --max_completion_length 1024 --learning_rate 1e-6"
)
_EXTERNAL = "--external_plugins examples/train/grpo/plugin/plugin.py"

TRAINED: dict[str, tuple[str, int]] = {
    "transformers": (f"--reward_funcs accuracy format --tuner_type lora {_SINGLE} --load_from_cache_file true", 1),
    "a reward function": (f"{_EXTERNAL} --reward_funcs external_math_acc external_math_format --train_type lora "
                          f"{_SINGLE}", 1),
    "four rewards": (f"--reward_funcs accuracy format cosine repetition --train_type lora {_SINGLE}", 1),
    "vLLM on one GPU": (f"--vllm_gpu_memory_utilization 0.5 --use_vllm true --sleep_level 1 --offload_model true "
                        f"--offload_optimizer true --gc_collect_after_offload true --reward_funcs accuracy format "
                        f"--train_type lora {_SINGLE}", 1),
    "a reward model": (f"--reward_model Qwen/rm --reward_funcs accuracy format --tuner_type lora {_SINGLE}", 1),
    "vLLM on the other GPU": (
        f"--use_vllm true --vllm_device auto --vllm_gpu_memory_utilization 0.5 --vllm_max_model_len 8192 {_SINGLE} "
        "--reward_funcs accuracy format --train_type lora --deepspeed zero2", 2),
    "async": (f"--reward_funcs accuracy format cosine repetition --use_vllm true --vllm_device auto --train_type full "
              f"--vllm_gpu_memory_utilization 0.7 --vllm_max_model_len 8192 --num_infer_workers 1 {_SEEN} "
              "--per_device_train_batch_size 7 --gradient_accumulation_steps 2 --num_generations 7 --temperature 0.9 "
              "--deepspeed zero2 --log_completions true --eval_steps 200 --save_steps 200", 2),
    "colocated with all": (f"--reward_funcs accuracy format --use_vllm true --vllm_device auto --train_type full "
                           f"--vllm_gpu_memory_utilization 0.7 --vllm_max_model_len 8192 --num_infer_workers 1 {_SEEN} "
                           "--per_device_train_batch_size 8 --num_generations 8 --temperature 0.9 --deepspeed zero2 "
                           "--log_completions true --sleep_level 1 --offload_model true --offload_optimizer true "
                           "--gc_collect_after_offload true", 1),
    "a server of an older release": (
        f"{_LARGE} --reward_funcs accuracy --use_vllm true --vllm_server_host node --vllm_server_port 8000 "
        "--train_type full --per_device_train_batch_size 8 --per_device_eval_batch_size 1 --num_infer_workers 1 "
        "--gradient_accumulation_steps 1 --beta 0.0", 1),
    "a server and what it ignores": (
        f"{_LARGE} --reward_funcs accuracy --use_vllm true --vllm_server_host node --train_type full "
        "--per_device_train_batch_size 8 --mini_batch_size 4 --vllm_device auto --vllm_max_model_len 4096 "
        "--vllm_gpu_memory_utilization 0.9 --async_generate true --max_length 2048", 1),
    "a server": (f"{_LARGE} {_SERVER} --reward_funcs accuracy --tuner_type full --per_device_train_batch_size 8 "
                 "--gradient_accumulation_steps 2 --beta 0.04", 1),
    "DAPO": ("--reward_funcs accuracy soft_overlong --max_completion_length 4096 --soft_cache_length 819 --epsilon 0.2 "
             "--epsilon_high 0.28 --dynamic_sample true --overlong_filter true --max_resample_times 3 --use_vllm true "
             "--vllm_gpu_memory_utilization 0.6 --num_infer_workers 1 --train_type full --torch_dtype bfloat16 "
             "--dataset rows.jsonl#5000 --num_train_epochs 1 --per_device_train_batch_size 8 "
             "--per_device_eval_batch_size 4 --learning_rate 1e-6 --eval_steps 1000 --save_steps 1000 "
             "--save_total_limit 2 --logging_steps 5 --warmup_ratio 0.05 --dataloader_num_workers 4 "
             "--dataset_num_proc 4 --num_generations 8 --temperature 1.0 --top_p 1.0 --deepspeed zero2 "
             "--log_completions true --num_iterations 1 --report_to tensorboard wandb --beta 0.0", 1),
    "a mixture of experts beside a server": (f"{_MOE} {_SERVER} --tuner_type full --gradient_accumulation_steps 14 "
                                             "--num_generations 14 --move_model_batches 5", 1),
    "its adapter": (f"{_MOE} {_SERVER} --tuner_type lora --gradient_accumulation_steps 14 --num_generations 14", 1),
    "a mixture of experts": (
        f"{_MOE} --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --vllm_tensor_parallel_size 2 "
        "--vllm_max_model_len 16384 --tuner_type lora --gradient_accumulation_steps 16 --num_generations 16 "
        "--sleep_level 1 --offload_model true --offload_optimizer true --move_model_batches 10", 1),
    "GSPO": (f"{_USUAL} --dataset rows.jsonl#10000 --beta 0.0 --epsilon 3e-4 --epsilon_high 4e-4 "
             "--steps_per_generation 32 --importance_sampling_level sequence --num_train_epochs 1 "
             "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 16 --tuner_type full "
             "--reward_funcs accuracy --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.6 "
             "--vllm_max_model_len 16384 --max_completion_length 8192 --offload_optimizer true --offload_model true "
             "--sleep_level 1 --save_steps 1000 --learning_rate 1e-6 --deepspeed zero3", 1),
    "SAPO": (f"--loss_type sapo --tau_pos 1 --tau_neg 1.05 {_EXTERNAL} --reward_funcs external_r1v_acc format {_SEEN} "
             "--use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.6 --vllm_tensor_parallel_size 1 "
             "--vllm_max_model_len 8192 --tuner_type full --overlong_filter false --importance_sampling_level token "
             "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --num_generations 8 "
             "--steps_per_generation 32 --sleep_level 1 --offload_model true --offload_optimizer true "
             "--report_to tensorboard swanlab --beta 0.001 --attn_impl flash_attention_2", 1),
    "CISPO": (f"--reward_funcs accuracy --tuner_type lora {_SINGLE} --loss_type cispo --epsilon_high 5.0", 1),
    "countdown": (f"{_EXTERNAL} --reward_funcs external_countdown format {_SERVER} --tuner_type full {_USUAL} "
                  "--dataset rows.jsonl#50000 --max_length 2048 --max_completion_length 1024 --num_train_epochs 1 "
                  "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --learning_rate 5e-7 "
                  "--gradient_accumulation_steps 8 --eval_steps 500 --save_steps 100 --save_total_limit 20 "
                  "--logging_steps 1 --output_dir output/GRPO_COUNTDOWN --warmup_ratio 0.01 --num_generations 8 "
                  "--temperature 1.0 --system 'You are a helpful assistant.' --deepspeed zero3 --log_completions true "
                  "--report_to wandb --beta 0.001 --num_iterations 1", 1),
    "code": (f"{_EXTERNAL} --reward_funcs external_code_reward external_code_format --reward_weights 1.0 0.1 {_SERVER} "
             f"--tuner_type lora --lora_rank 16 --lora_alpha 32 {_SEEN} --per_device_train_batch_size 2 "
             "--gradient_accumulation_steps 7 --num_generations 14 --eval_steps 200 --save_steps 200 --deepspeed zero2 "
             "--temperature 0.9 --log_completions true --report_to wandb", 1),
    "two updates": (f"{_EXTERNAL} --reward_funcs external_r1v_acc format {_SERVER} --tuner_type full {_USUAL} "
                    "--dataset rows.jsonl --max_completion_length 1024 --num_train_epochs 1 --eval_strategy steps "
                    "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 2 "
                    "--save_strategy steps --eval_steps 400 --save_steps 400 --save_total_limit 10 --logging_steps 1 "
                    "--output_dir output/GRPO_GEOQA --warmup_ratio 0.05 --num_generations 8 --temperature 1.0 "
                    "--repetition_penalty 1.1 --system examples/train/grpo/prompt.txt --deepspeed zero3 "
                    "--log_completions true --report_to wandb --num_iterations 2 --async_generate false --beta 0.001 "
                    "--max_grad_norm 0.5", 1),
    "vLLM over four GPUs": (f"{_SEEN} --tuner_type lora --use_vllm true --vllm_mode colocate "
                            "--vllm_gpu_memory_utilization 0.55 --vllm_max_model_len 2048 "
                            "--vllm_tensor_parallel_size 4 --per_device_train_batch_size 4 --num_generations 4 "
                            "--reward_funcs accuracy format --temperature 1.0 --top_p 1.0 --top_k 80 "
                            "--move_model_batches 16 --offload_optimizer true --offload_model true --sleep_level 1", 1),
    "several nodes": (f"{_SEEN} --reward_funcs accuracy --use_vllm true --vllm_mode server --tuner_type full "
                      "--vllm_server_host a b --vllm_server_port 8000 8001 --per_device_train_batch_size 4 "
                      "--num_generations 4 --deepspeed zero2 --log_completions true", 1),
}  # fmt: skip
"""By what it shows: the arguments of ``swift rlhf --rlhf_type grpo``, and how many GPUs are visible."""

SERVED = {
    "a server": "",
    "two GPUs": "--vllm_tensor_parallel_size 2",
    "an engine for each of two": "--vllm_data_parallel_size 2",
    "the same by an older name": "--data_parallel_size 2",
    "two of two": "--vllm_tensor_parallel_size 2 --vllm_data_parallel_size 2 --port 8001",
    "an adapter": "--vllm_enable_lora true --vllm_max_lora_rank 16",
    "a length": "--vllm_max_model_len 16384 --vllm_enable_prefix_caching true",
    "deployed": "--infer_backend vllm --use_async_engine false --tensor_parallel_size 2",
    "with logprobs": "--infer_backend vllm --use_async_engine true --max_logprobs 20 --max_model_len 8192",
    "one with turns": "--vllm_use_async_engine true --multi_turn_scheduler thinking_tips_scheduler "
                      "--vllm_max_model_len 32768 --vllm_gpu_memory_utilization 0.8 --max_turns 3",
}  # fmt: skip
"""By what it shows: the arguments of ``swift rollout`` and ``swift deploy``."""

PLUGIN = """
from swift.plugin import ORM, orms

class Short(ORM):
    def __call__(self, completions, **kwargs):
        return [-len(text) / 100 for text in completions]

for name in ("math_acc", "math_format", "r1v_acc", "countdown", "code_reward", "code_format"):
    orms["external_" + name] = Short
"""


def swift_files(folder: Path) -> None:
    """What ms-swift's examples name."""
    examples = folder / "examples/train/grpo"
    (examples / "plugin").mkdir(parents=True)
    (examples / "prompt.txt").write_text("Think first.\n")
    (examples / "plugin/plugin.py").write_text(PLUGIN)
    rows = [{"problem": f"{n}+2=", "solution": str(n + 2)} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def given(line: str) -> dict[str, list[str]]:
    """A command line, by the arguments' names."""
    names = {name: argument.name for argument in (*DEPLOY, *RLHF) for name in (argument.name, *argument.also)}
    words = swift.repeated(shlex.split(line))
    found: dict[str, list[str]] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        found.setdefault(names[flag.removeprefix("--")], []).append(value)
    return found


@pytest.mark.parametrize("what", TRAINED)
def test_ms_swifts_examples(what: str, here: Path) -> None:
    swift_files(here)
    line, gpus = TRAINED[what]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    found = swift.rlhf(given(f"--rlhf_type grpo --model Qwen/Qwen2.5-7B {line}"), visible)
    check_pairs(from_options(found.options, ELSEWHERE.get(what, ()), Path("x")).config)


@pytest.mark.parametrize("what", SERVED)
def test_ms_swifts_servers(what: str) -> None:
    found = swift.deploy(given(f"--model Qwen/Qwen2.5-7B-Instruct {SERVED[what]}"))
    check_pairs(from_options(found.options, (), Path("x")).config)
