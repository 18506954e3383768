"""ms-swift's command line, as recipes; its file of completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import app as cli
from tandem.compat import swift
from tandem.compat.swift.completions import CompletionsFile
from tandem.compat.swift.datasets import SwiftDataset, row
from tandem.compat.swift.options import DEPLOY, RLHF
from tandem.config.loading import from_options
from tandem.errors import ConfigError, EnvError
from tandem.observability.loggers.base import RunInfo
from tandem.trainer.assemble import check_pairs

Run = Callable[..., tuple[int, str, str]]
START = "--model m --dataset d.jsonl --reward_funcs accuracy --gradient_accumulation_steps 8 --max_steps 10"
COLOCATE = "--use_vllm true --vllm_mode colocate"
SERVER = "--use_vllm true --vllm_mode server --vllm_server_host node"
FULL = "--train_type full"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"query": f"{i}+2=", "solution": str(i + 2)} for i in range(20)]
    Path("d.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    Path("mine.py").write_text("from swift.plugin import orms\norms['mine'] = lambda completions, **_: completions\n")
    Path("system.txt").write_text("Think.\n")


def words(line: str) -> dict[str, list[str]]:
    """A command line as the verb hands it on; a word for each argument's older name is its newer one."""
    names = {name: argument.name for argument in (*DEPLOY, *RLHF) for name in (argument.name, *argument.also)}
    given: dict[str, list[str]] = {}
    parts = swift.repeated(line.split())
    for flag, value in zip(parts[::2], parts[1::2], strict=True):
        given.setdefault(names[flag.removeprefix("--")], []).append(value)
    return given


def translated(line: str, environ: Mapping[str, str] | None = None, start: str = START) -> swift.SwiftTranslation:
    return swift.rlhf(words(start) | words(line), environ or {})


def options(line: str = "") -> dict[str, Any]:
    return translated(line).options


def refusal(line: str, environ: Mapping[str, str] | None = None, start: str = START) -> str:
    with pytest.raises(ConfigError) as refused:
        translated(line, environ, start)
    return str(refused.value)


def at(recipe: Any, path: str) -> Any:
    """An option by its dotted path; None if it is left out."""
    for name in path.split("."):
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    return recipe


# Each argument


def test_the_defaults_of_ms_swift() -> None:
    assert options() == {
        "model": "m",
        "steps": 10,
        "env": {"kind": "tandem.compat.swift.datasets:SwiftDataset", "path": "d.jsonl", "test_share": 0.0},
        "rewards": {"accuracy": {"kind": "math_verify", "weight": 1.0}},
        "groups_per_step": 1,
        "group_size": 8,
        "sampling": {"temperature": 0.9, "max_tokens": 512},
        "flat_groups": "keep",
        "advantage": {"kind": "grpo", "eps": 1e-4},
        "loss": {"kind": "grpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "reduction": "sequence"},
        "reference": {"kind": "start", "beta": 0.04, "estimator": "k3", "ratio_corrected": False},
        "optimizer": {
            "kind": "adamw", "lr": 1e-4, "schedule": "cosine", "max_grad_norm": 1.0, "weight_decay": 0.1,
            "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
        },
        "trains": {"kind": "lora", "rank": 8, "alpha": 32, "target_modules": "all-linear"},
        "engine": {"kind": "embedded"},
        "sync": {"kind": "shared"},
        "dtype": "bfloat16",
        "checkpointing": "full",
        "seed": 42,
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 10, "keep": 1},
        "sinks": ["console", {"kind": "tandem.compat.swift.completions:CompletionsFile"}],
        "runs": "output/m",
    }  # fmt: skip


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("--model org/name", {"model": "org/name", "runs": "output/name"}),
    ("--torch_dtype float32", {"dtype": "float32"}),
    ("--seed 7", {"seed": 7}),
    ("--max_length 100", {"context": 612, "micro_batch_tokens": 612}),
    (FULL, {"trains": {"kind": "full"}, "optimizer.lr": 1e-5}),
    ("--tuner_type full", {"trains": {"kind": "full"}}),
    ("--per_device_train_batch_size 4", {"groups_per_step": 4}),
    ("--gradient_accumulation_steps 16", {"groups_per_step": 2}),
    ("--num_generations 4", {"groups_per_step": 2, "group_size": 4}),
    (f"{FULL} {SERVER} --generation_batch_size 32", {"max_lag": 3, "sync": {"kind": "broadcast", "every": 4}}),
    ("--generation_batch_size 32", {"max_lag": 3, "sync": {"kind": "shared"}}),
    (f"{FULL} {COLOCATE} --steps_per_generation 16", {"max_lag": 1, "sync": {"kind": "shared"}}),
    (f"{FULL} {SERVER} --steps_per_generation 16", {"max_lag": 1, "sync": {"kind": "broadcast", "every": 2}}),
    ("--max_steps -1", {"steps": 60}),
    ("--max_steps -1 --num_train_epochs 0.5", {"steps": 10}),
    ("--max_steps -1 --dataset d.jsonl#6", {"steps": 18, "env.max_rows": 6}),
    ("--max_steps 30", {"steps": 30, "checkpoint": {"every": 30, "keep": 1}}),
    ("--learning_rate 1e-6", {"optimizer.lr": 1e-6}),
    ("--lr_scheduler_type constant_with_warmup --warmup_steps 3",
     {"optimizer.schedule": "constant", "optimizer.warmup_steps": 3}),
    ('--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr":1e-5}', {"optimizer.min_lr_ratio": 0.1}),
    ("--warmup_ratio 0.15", {"optimizer.warmup_steps": 2}),
    ("--lr_scheduler_type constant --warmup_ratio 0.15", {"optimizer.schedule": "constant",
                                                          "optimizer.warmup_steps": None}),
    ("--weight_decay 0", {"optimizer.weight_decay": 0.0}),
    ("--adam_beta1 0.8 --adam_beta2 0.9 --adam_epsilon 1e-6",
     {"optimizer.beta1": 0.8, "optimizer.beta2": 0.9, "optimizer.eps": 1e-6}),
    ("--max_grad_norm 0.5", {"optimizer.max_grad_norm": 0.5}),
    ("--optim adafactor", {"optimizer.kind": "adafactor", "optimizer.beta1": None}),
    ("--offload_optimizer true", {"optimizer.kind": "adamw_cpu"}),
    ("--gradient_checkpointing false", {"checkpointing": None}),
    ("--beta 0", {"reference": None}),
    ("--beta 0.001", {"reference.beta": 0.001}),
    ("--sync_ref_model true --ref_model_mixup_alpha 0.5 --ref_model_sync_steps 4",
     {"reference.kind": "average", "reference.mixup": 0.5, "reference.every": 4}),
    ("--sync_ref_model true --ref_model_sync_steps 7 --num_iterations 2 --split_dataset_ratio 0.2 --eval_steps 5",
     {"steps": 5, "updates": 2, "reference.kind": "average", "reference.every": 4, "evaluate.every": 3}),
    ("--ref_model m", {}),
    ("--epsilon 0.1", {"loss.clip_low": 0.1, "loss.clip_high": 0.1}),
    ("--epsilon_high 0.28", {"loss.clip_low": 0.2, "loss.clip_high": 0.28}),
    ("--delta 4", {"loss.dual_clip": 4.0}),
    ("--loss_type dapo", {"loss.reduction": "token"}),
    ("--loss_type bnpo", {"loss.reduction": "token"}),
    ("--loss_type dr_grpo", {"loss.reduction": "constant"}),
    ("--loss_type cispo --epsilon_high 5", {"loss": {"kind": "cispo", "cap": 5.0, "reduction": "token"}}),
    ("--loss_type sapo --tau_pos 2 --tau_neg 3",
     {"loss.kind": "sapo", "loss.temperature_positive": 2.0, "loss.temperature_negative": 3.0}),
    ("--importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4",
     {"loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence"}}),
    ("--advantage_estimator rloo --kl_in_reward false", {"advantage": {"kind": "rloo"}}),
    ("--advantage_estimator rloo --beta 0", {"advantage": {"kind": "rloo"}, "reference": None}),
    ("--off_policy_sequence_mask_delta 0.3", {"corrections": [{"kind": "opsm", "threshold": 0.3}]}),
    ("--rollout_importance_sampling_mode sequence_mask --off_policy_sequence_mask_delta 0.3", {"corrections": [
        {"kind": "sequence", "beyond": "mask", "high": 2.0}, {"kind": "opsm", "threshold": 0.3}],
        "old_logprobs": "recomputed", "loss": {"kind": "grpo", "reduction": "sequence"}}),
    ("--scale_rewards none", {"advantage": {"kind": "dr_grpo"}}),
    ("--scale_rewards batch", {"advantage": {"kind": "batch_std", "eps": 1e-4}}),
    ("--scale_rewards gdpo", {"advantage": {"kind": "gdpo", "eps": 1e-4}}),
    ("--num_iterations 2", {"updates": 2, "steps": 5}),
    ("--rollout_importance_sampling_mode token_truncate --rollout_importance_sampling_threshold 3",
     {"old_logprobs": "recomputed", "corrections": [{"kind": "token", "beyond": "truncate", "high": 3.0}],
      "loss": {"kind": "grpo", "reduction": "sequence"}}),
    ("--lora_rank 16 --lora_alpha 8 --target_modules q_proj v_proj",
     {"trains": {"kind": "lora", "rank": 16, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}}),
    ("--lora_dropout 0", {}),
    ("--dataset org/rows:main#500", {"env.path": "org/rows", "env.subset": "main", "env.max_rows": 500}),
    ("--val_dataset other.jsonl --eval_steps 5", {"env.test_path": "other.jsonl", "evaluate.every": 5}),
    ("--split_dataset_ratio 0.2", {"env.test_share": 0.2, "evaluate.every": 500, "evaluate.samples": 8}),
    ("--system Think.\\nAnswer.", {"env.system": "Think.\nAnswer."}),
    ("--system system.txt", {"env.system": "Think.\n"}),
    ("--reward_funcs accuracy format --reward_weights 2 0.5", {"rewards.accuracy.weight": 2.0,
     "rewards.format.weight": 0.5, "env.gold_reply": "<think></think>\n<answer>\n{answer}\n</answer>"}),
    ("--reward_funcs cosine --cosine_min_len_value_wrong -1 --cosine_max_len_value_wrong -2 "
     "--cosine_min_len_value_correct 3 --cosine_max_len_value_correct 4 --cosine_max_len 9",
     {"rewards.cosine": {"kind": "cosine_length", "accuracy": "math_verify", "max_tokens": 9, "right_short": 3.0,
                         "right_long": 4.0, "wrong_short": -1.0, "wrong_long": -2.0, "weight": 1.0}}),
    ("--reward_funcs repetition --repetition_n_grams 4 --repetition_max_penalty -0.5",
     {"rewards.repetition": {"kind": "repetition", "ngram": 4, "weight": 0.5}}),
    ("--reward_funcs soft_overlong --soft_max_length 100 --soft_cache_length 20",
     {"rewards.soft_overlong": {"kind": "tandem.compat.swift.rewards:SwiftSoftOverlong", "max_tokens": 100, "cache": 20,
                                "weight": 1.0}}),
    ("--reward_funcs mine --external_plugins mine.py", {"rewards.mine.kind": "tandem.compat.swift.plugin:PluginReward",
     "rewards.mine.registered": "mine", "rewards.mine.files": ["mine.py"], "rewards.mine.weight": 1.0,
     "rewards.mine.arguments.max_steps": 10}),
    ("--multi_turn_scheduler turns --external_plugins mine.py --max_turns 3", {
        "env.kind": "tandem.compat.swift.schedulers:ScheduledDataset",
        "env.scheduler": "turns", "env.files": ["mine.py"],
        "env.max_turns": 3, "env.model": "m"}),
    ("--reward_model rm --reward_model_plugin default --reward_weights 1 3",
     {"rewards.reward_model": {"kind": "reward_model", "model": "rm", "weight": 3.0}}),
    ("--max_completion_length 64", {"sampling.max_tokens": 64}),
    ("--repetition_penalty 1.1", {"sampling.repetition_penalty": 1.1}),
    ("--max_new_tokens 64", {"sampling.max_tokens": 64}),
    ("--enable_thinking false", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("--split_dataset_ratio 0.2 --num_generations_eval 3", {"env.test_share": 0.2, "evaluate.samples": 3}),
    ("--temperature 1 --top_p 0.9 --top_k 50 --min_p 0.1",
     {"sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "max_tokens": 512}}),
    ("--stop_words </answer> END", {"sampling.stop": ["</answer>", "END"]}),
    ("--dynamic_sample true", {"flat_groups": "drop", "max_resample_times": 3}),
    ("--dynamic_sample true --max_resample_times 5", {"flat_groups": "drop", "max_resample_times": 5}),
    ("--overlong_filter true", {"truncated": "mask"}),
    (f"{COLOCATE} --structured_outputs_regex [0-9]+",
     {"sampling": {"temperature": 0.9, "regex": "[0-9]+", "max_tokens": 512}, "old_logprobs": "recomputed",
      "loss": {"kind": "grpo", "reduction": "sequence"}}),
    (f"{COLOCATE} --structured_outputs_regex [0-9]+ --rollout_importance_sampling_mode token_mask",
     {"sampling": {"temperature": 0.9, "regex": "[0-9]+", "max_tokens": 512}, "old_logprobs": "recomputed",
      "loss": {"kind": "grpo", "reduction": "sequence"},
      "corrections": [{"kind": "token", "beyond": "mask", "high": 2.0}]}),
    ("--truncation_strategy delete", {}),
    ("--loss_scale default", {}),
    ("--max_length 88 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --mini_batch_size 2",
     {"context": 600, "micro_batch_tokens": 1200}),
    ('--columns {"q":"query"}', {"env.columns": {"q": "query"}}),
    (f"{COLOCATE} --vllm_max_logprobs 5", {"engine.args": {"max_logprobs": 5}}),
    ("--split_dataset_ratio 0.2 --eval_strategy no", {"env.test_share": 0.2, "evaluate": {"tasks": 0}}),
    ("--split_dataset_ratio 0.2 --eval_strategy epoch --max_steps 30",
     {"env.test_share": 0.2, "steps": 30, "evaluate.every": 10}),
    ("--save_strategy epoch --max_steps 30", {"steps": 30, "checkpoint": {"every": 10, "keep": 3}}),
    (f"{FULL} --use_vllm true", {"engine": {"kind": "vllm"}, "sync": {"kind": "shared"}}),
    (f"{FULL} {COLOCATE} --sleep_level 1", {"engine": {"kind": "vllm"}, "sync": {"kind": "shared"}}),
    (f"{FULL} {COLOCATE} --vllm_tensor_parallel_size 2 --sleep_level 2",
     {"engine": {"kind": "vllm", "tensor_parallel_size": 2, "sleep": 2}, "sync": {"kind": "broadcast"}}),
    (f"{FULL} {COLOCATE} --vllm_tensor_parallel_size 2 --sleep_level 1 --async_generate true",
     {"engine": {"kind": "vllm", "tensor_parallel_size": 2}, "sync": {"kind": "broadcast"}, "max_lag": 1}),
    (COLOCATE, {"trains.merged": True, "sync": {"kind": "shared"}}),
    (f"{COLOCATE} --vllm_enable_lora true", {"trains.merged": None}),
    (f"{COLOCATE} --vllm_gpu_memory_utilization 0.3", {"engine.gpu_memory_utilization": 0.3}),
    (f"{COLOCATE} --gpu_memory_utilization 0.3", {"engine.gpu_memory_utilization": 0.3}),
    (f"{COLOCATE} --vllm_max_model_len 99 --vllm_max_num_seqs 3",
     {"engine.max_model_len": 99, "engine.max_num_seqs": 3}),
    (f"{COLOCATE} --vllm_enforce_eager true --vllm_enable_prefix_caching false",
     {"engine.enforce_eager": True, "engine.enable_prefix_caching": False}),
    (COLOCATE + ' --vllm_limit_mm_per_prompt {"image":0}', {"engine.limit_mm_per_prompt": {"image": 0}}),
    (f"{FULL} {COLOCATE} --vllm_tensor_parallel_size 2",
     {"engine.tensor_parallel_size": 2, "sync": {"kind": "broadcast"}}),
    (COLOCATE + ' --vllm_engine_kwargs {"block_size":16} --vllm_disable_custom_all_reduce true',
     {"engine.args": {"block_size": 16, "disable_custom_all_reduce": True}}),
    (f"{COLOCATE} --vllm_disable_cascade_attn true --vllm_enable_expert_parallel true",
     {"engine.args": {"disable_cascade_attn": True, "enable_expert_parallel": True}}),
    (f"{FULL} {COLOCATE} --async_generate true", {"max_lag": 1}),
    (f"{FULL} {COLOCATE} --vllm_device cuda:2 cuda:3 --num_infer_workers 2 --async_generate true",
     {"engine": {"kind": "vllm", "devices": ["2", "3"], "replicas": 2}, "sync": {"kind": "broadcast"}, "max_lag": 1}),
    (f"{FULL} {COLOCATE} --vllm_device cuda:2 cuda:3 --vllm_tensor_parallel_size 2",
     {"engine": {"kind": "vllm", "devices": ["2,3"], "tensor_parallel_size": 2}}),
    (f"{FULL} {SERVER}", {"engine": {"kind": "vllm", "urls": ["http://node:8000"], "start_seconds": 120.0},
                          "sync": {"kind": "broadcast"}}),
    ("--use_vllm true --vllm_server_host 0.0.0.0 --vllm_server_port 9 --vllm_server_timeout 7",
     {"engine": {"kind": "vllm", "urls": ["http://127.0.0.1:9"], "start_seconds": 7.0}}),
    ("--use_vllm true --vllm_server_host a b --vllm_server_port 1 2", {"engine.urls": ["http://a:1", "http://b:2"]}),
    ("--use_vllm true --vllm_server_base_url http://a:1/v1", {"engine.urls": ["http://a:1"]}),
    (f"{SERVER} --async_generate true", {"max_lag": 1, "trains.merged": True}),
    (f"{SERVER} --vllm_enable_lora true", {"trains.merged": None, "sync": {"kind": "broadcast"}}),
    ("--output_dir x --run_name r", {"runs": "x", "name": "r"}),
    ("--output_dir x/y --add_version false", {"runs": "x", "name": "y"}),
    ("--save_steps 4 --save_total_limit 2", {"checkpoint": {"every": 4, "keep": 2}}),
    ("--save_steps 4", {"checkpoint": {"every": 4, "keep": 3}}),
    ("--save_steps 0.25", {"checkpoint": {"every": 3, "keep": 4}}),
    ("--split_dataset_ratio 0.2 --save_steps 0.3", {"env.test_share": 0.2, "evaluate.every": 3}),
    ("--split_dataset_ratio 0.2 --eval_steps 0.45", {"env.test_share": 0.2, "evaluate.every": 5}),
    ("--split_dataset_ratio 0.2 --eval_steps 1", {"env.test_share": 0.2, "evaluate.every": 1}),
    ("--save_strategy no", {"checkpoint": {"every": 10, "keep": 1}}),
    ("--log_completions false", {"sinks": ["console"]}),
    ("--report_to none", {}),
    ("--rlhf_type grpo", {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("line", "changes"), CHANGES)
def test_every_argument_changes_the_recipe(line: str, changes: dict[str, Any]) -> None:
    recipe = options(line)
    assert {path: at(recipe, path) for path in changes} == changes
    if not line.startswith("--model"):
        untouched = {path.partition(".")[0] for path in changes} | {"optimizer", "trains", "engine", "sync", "rewards"}
        rest = {name: value for name, value in options().items() if name not in untouched | {"env", "checkpoint"}}
        assert {name: recipe[name] for name in rest if name in recipe} == {n: v for n, v in rest.items() if n in recipe}


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["", *(line for line, _ in CHANGES if "adafactor" not in line and "sleep_level 2" not in line)]
)
def test_the_recipe_loads_and_its_parts_go_together(line: str) -> None:
    check_pairs(from_options(options(line), ("checkpoint.keep=1",), Path("x")).config)


def test_every_argument_is_tried() -> None:
    tried = {name for line, _ in CHANGES for name in words(line)}
    tried |= {name for line, _ in (*REFUSED, *TOLD) for name in words(line)} | set(words(START))
    assert {a.name for a in RLHF if a.becomes} - tried == set()


def test_several_data_sets() -> None:
    Path("e.jsonl").write_text('{"query": "1+1=", "solution": "2"}\n')
    envs = options("--dataset d.jsonl#3 e.jsonl#1")["envs"]
    assert {name: source["weight"] for name, source in envs.items()} == {"d-1": 3, "e-2": 1}
    assert envs["d-1"]["rewards"] == {"accuracy": {"kind": "math_verify", "weight": 1.0}}
    assert "rewards" not in options("--dataset d.jsonl#3 e.jsonl#1")
    from_options(options("--dataset d.jsonl e.jsonl"), (), Path("x"))


def test_several_data_sets_are_drawn_from_as_one() -> None:
    """Each row as often as any other, with what is held out left out."""
    Path("e.jsonl").write_text("".join(json.dumps({"query": f"{i}", "solution": "2"}) + "\n" for i in range(7)))
    found = options("--dataset d.jsonl e.jsonl#5 --max_steps -1 --num_train_epochs 2")
    assert [source["weight"] for source in found["envs"].values()] == [20, 5]
    assert found["steps"] == 50
    held = options("--dataset d.jsonl e.jsonl --split_dataset_ratio 0.3")["envs"]
    assert [source["weight"] for source in held.values()] == [
        len(SwiftDataset(path=path, test_share=0.3).tasks("train")) for path in ("d.jsonl", "e.jsonl")
    ]
    assert held["d-1"]["weight"] < 20


REFUSED: list[tuple[str, str]] = [
    ("--rlhf_type dpo", "--rlhf_type: Tandem trains by grpo"),
    ("--use_vllm true --vllm_mode server", "--vllm_server_host: --vllm_mode server needs it"),
    ("--use_vllm true --vllm_mode both", "there is no 'both'; choose from colocate, server"),
    (f"{COLOCATE} --sleep_level 3", "--sleep_level: it is 0, 1 or 2"),
    ("--reward_funcs soft_overlong", "--soft_cache_length: soft_overlong needs it"),
    ("--ref_model other", "--ref_model: the reference is the model as the run begins"),
    ("--train_type adalora", "--train_type: there is no 'adalora' here; choose from lora, full"),
    ("--torch_dtype float16", "--torch_dtype: there is no 'float16'"),
    ("--loss_type other", "--loss_type: there is no 'other'"),
    ("--loss_type cispo", "--epsilon_high: of cispo it is the largest weight"),
    ("--advantage_estimator reinforce_plus_plus", "--advantage_estimator: there is no 'reinforce_plus_plus'"),
    ("--advantage_estimator rloo --beta 0 --scale_rewards group", "--scale_rewards: rloo scales nothing"),
    ("--gradient_accumulation_steps 6", "--num_generations: per_device_train_batch_size x"),
    ("--num_generations 1", "--num_generations: it must be at least 2"),
    (f"{SERVER} --generation_batch_size 12", "12 completions are no whole number of steps of 8"),
    ("--split_dataset_ratio 0.2 --eval_steps 2.5", "--eval_steps: it is a whole number of steps, or a share"),
    ("--save_steps 1.5", "--save_steps: it is a whole number of steps, or a share"),
    ("--split_dataset_ratio 0.2 --eval_steps 0", "--eval_steps: it must be above 0"),
    ("--system nothere.txt", "--system: there is no file nothere.txt"),
    ("--reward_funcs nothing", "there is no 'nothing'; choose from accuracy"),
    ("--reward_funcs nothing mine --external_plugins mine.py",
     "there is no 'nothing'; choose from accuracy, format, cosine, repetition, soft_overlong, mine"),
    ("--external_plugins nothere.py", "--external_plugins: there is no plug-in file nothere.py"),
    ("--reward_weights 1 2", "--reward_weights: there are 2 for 1 rewards"),
    ("--reward_model rm --reward_model_plugin genrm", "--reward_model_plugin: the reward is the model's own output"),
    ("--multi_turn_scheduler s", "--multi_turn_scheduler: name the file that registers s by --external_plugins"),
    ("--kl_in_reward true", "--kl_in_reward: the penalty is a term of the loss, not of the reward"),
    ("--advantage_estimator rloo", "--kl_in_reward: the penalty is a term of the loss, where rloo puts it unless"),
    ("--resume_from_checkpoint c", "tandem train RUN"),
    ("--optim lion", "--optim: there is no 'lion' here"),
    ("--offload_optimizer true --optim adafactor", "--offload_optimizer: it is of adamw"),
    ("--temperature warm", "--temperature: it takes a number, not 'warm'"),
    ("--use_vllm maybe", "--use_vllm: it takes true or false, not 'maybe'"),
    (f"{COLOCATE} --num_infer_workers 2", "--num_infer_workers: 0 GPUs are visible; write 1 where"),
    (f"{COLOCATE} --vllm_device gpu", "--vllm_device: write GPUs such as cuda:1"),
    ("--mini_batch_size 3", "--mini_batch_size: per_device_train_batch_size 1 is no multiple of it"),
    ("--loss_scale react", "--loss_scale: every sampled token counts as one"),
    ("--truncation_strategy split", "--truncation_strategy: there is no 'split' here"),
    ("--eval_strategy never", "--eval_strategy: there is no 'never' here"),
]  # fmt: skip
TOLD: list[tuple[str, str]] = [
    ("--vllm_mode colocate", "--vllm_mode: changes nothing without --use_vllm true"),
    ("--vllm_server_host x", "--vllm_server_host: changes nothing without --use_vllm true"),
    ("--async_generate true", "--async_generate: changes nothing without --use_vllm true"),
    ("--sleep_level 1", "--sleep_level: changes nothing without --use_vllm true"),
    *((f"{SERVER} --{name} {value}", f"--{name}: changes nothing with --vllm_mode server") for name, value in {
        "vllm_gpu_memory_utilization": "0.5", "vllm_max_model_len": "9", "vllm_max_num_seqs": "9",
        "vllm_enforce_eager": "true", "vllm_limit_mm_per_prompt": "{}", "vllm_enable_prefix_caching": "false",
        "vllm_tensor_parallel_size": "2", "sleep_level": "1", "vllm_device": "cuda:1", "offload_model": "true",
        "move_model_batches": "2"}.items()),
    *((f"{COLOCATE} --{name} {value}", f"--{name}: changes nothing with --vllm_mode colocate") for name, value in {
        "vllm_server_host": "x", "vllm_server_port": "1", "vllm_server_timeout": "1",
        "vllm_server_base_url": "http://x"}.items()),
    (f"{COLOCATE} --vllm_device cuda:2 --sleep_level 1", "--sleep_level: changes nothing: the engine is on other GPUs"),
    ("--max_resample_times 5", "--max_resample_times: changes nothing without --dynamic_sample true"),
    ("--cosine_max_len 3", "--cosine_max_len: changes nothing without cosine among --reward_funcs"),
    ("--repetition_n_grams 4", "--repetition_n_grams: changes nothing without repetition"),
    ("--soft_max_length 3", "--soft_max_length: changes nothing without soft_overlong"),
    ("--ref_model_sync_steps 3", "--ref_model_sync_steps: changes nothing without --sync_ref_model true"),
    ("--beta 0 --sync_ref_model true", "--sync_ref_model: changes nothing with --beta 0"),
    (f"{FULL} --lora_rank 4", "--lora_rank: changes nothing with --train_type full"),
    ("--lora_dropout 0.1", "--lora_dropout: changes nothing: Tandem has no dropout"),
    ("--loss_type cispo --epsilon_high 5 --epsilon 0.1", "--epsilon: changes nothing with --loss_type cispo"),
    ("--loss_type sapo --delta 3", "--delta: changes nothing with that loss"),
    ("--tau_pos 2", "--tau_pos: changes nothing with --loss_type grpo"),
    ("--importance_sampling_level sequence --delta 3", "--delta: changes nothing with that loss"),
    ("--rollout_importance_sampling_threshold 3", "without --rollout_importance_sampling_mode"),
    ("--rollout_importance_sampling_mode token_mask --epsilon 0.1", "--epsilon: changes nothing where"),
    ("--eval_steps 3", "--eval_steps: changes nothing without --val_dataset"),
    ("--external_plugins mine.py", "--external_plugins: mine.py registers none of --reward_funcs (mine)"),
    ("--custom_register_path mine.py", "--external_plugins: mine.py registers none of --reward_funcs (mine)"),
    ("--truncation_strategy left", "--truncation_strategy: a prompt without room is an error here, not cut"),
    ("--report_to swanlab", "--report_to: there is no sink for swanlab"),
    ("--mini_batch_size 1", "--mini_batch_size: changes nothing without --max_length"),
    ("--max_turns 3", "--max_turns: changes nothing without --multi_turn_scheduler"),
    (f"{COLOCATE} --vllm_device cuda:1 --num_infer_workers 2",
     "--num_infer_workers: changes nothing: vllm_device names 1"),
    ("--split_dataset_ratio 0.2 --val_dataset o.jsonl", "--split_dataset_ratio: changes nothing beside --val_dataset"),
    (f"{SERVER} --vllm_server_base_url http://x", "--vllm_server_host: changes nothing beside --vllm_server_base_url"),
    ("--optim adafactor --adam_beta1 0.8", "--adam_beta1: changes nothing with --optim adafactor"),
    *((f"{SERVER} --{name} {value}", f"--{name}: changes nothing with --vllm_mode server")
      for name, value in {"num_infer_workers": "1", "vllm_device": "auto", "vllm_max_logprobs": "5"}.items()),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_would_change_the_result_is_refused_by_name(line: str, message: str) -> None:
    assert message in refusal(line)


@pytest.mark.parametrize(("line", "message"), TOLD)
def test_what_cannot_matter_is_told(line: str, message: str) -> None:
    """As ms-swift itself ignores it, or warns."""
    assert any(message in note for note in translated(line).notes)


def test_ratios_of_a_round_of_several_steps_are_not_said_to_be_one() -> None:
    """Later steps of a round have left the policy that generated, so that clips count."""
    mode = "--rollout_importance_sampling_mode token_truncate --epsilon 0.1"
    for size in ("steps_per_generation", "generation_batch_size"):
        found = translated(f"{SERVER} --{size} 16 {mode}")
        assert not any(note.startswith("--epsilon") for note in found.notes)
        assert any("token_truncate is left out: ratios to the engine" in note for note in found.notes)
        assert at(found.options, "loss.clip_low") == 0.1
        assert {"corrections", "old_logprobs"} & set(found.options) == set()
        masked = translated(f"{SERVER} --{size} 16 --rollout_importance_sampling_mode token_mask").options
        assert (masked["corrections"], "old_logprobs" in masked) == (
            [{"kind": "token", "beyond": "mask", "high": 2.0}], False)  # fmt: skip
        check_pairs(from_options(masked, (), Path("x")).config)
    assert "makes every ratio 1" in str(translated(f"{SERVER} --steps_per_generation 8 {mode}").notes)


@pytest.mark.parametrize("argument", [a for a in RLHF if a.refused], ids=lambda a: a.name)
def test_what_is_refused_says_why(argument: Any) -> None:
    value = {"whole": "3", "number": "0.3", "truth": str(not argument.default), "mapping": '{"a":1}'}
    assert argument.refused in refusal(f"--{argument.name} {value.get(argument.takes, 'x')}")


@pytest.mark.parametrize("argument", [a for a in RLHF if a.idle and not a.where], ids=lambda a: a.name)
def test_what_changes_nothing_is_told(argument: Any) -> None:
    value = {"whole": "3", "number": "0.3", "truth": "true", "mapping": '{"a":1}'}.get(argument.takes, "x")
    found = translated(f"--{argument.name} {value}")
    assert found.options == options()
    assert f"--{argument.name}: changes nothing: {argument.idle}" in found.notes


PLACES = {"lora": "", "reward model": "--reward_model rm", "server": SERVER, "vllm": COLOCATE, "colocate": COLOCATE}
"""By what an argument belongs to: a command line where it counts."""
ELSEWHERE = {"lora": FULL, "reward model": "", "server": COLOCATE, "vllm": "", "colocate": SERVER}
"""The same where it does not."""


@pytest.mark.parametrize("argument", [a for a in RLHF if a.idle and a.where], ids=lambda a: a.name)
def test_what_changes_nothing_is_told_where_it_belongs_and_elsewhere(argument: Any) -> None:
    said = f"--{argument.name} {({'whole': '3', 'number': '3', 'truth': 'true'}).get(argument.takes, 'x')}"
    found = translated(f"{PLACES[argument.where]} {said}")
    assert found.options == options(PLACES[argument.where])
    assert f"--{argument.name}: changes nothing: {argument.idle}" in found.notes
    elsewhere = translated(f"{ELSEWHERE[argument.where]} {said}").notes
    assert any(note.startswith(f"--{argument.name}: changes nothing with") for note in elsewhere)


def test_what_means_something_else_here_is_told() -> None:
    for name in ("warmup_steps", "warmup_ratio"):
        told = translated(f"--lr_scheduler_type constant --{name} 1").notes
        assert any(note.startswith(f"--{name}: changes nothing with --lr_scheduler_type constant") for note in told)
    (told,) = (n for n in translated(f"{SERVER} --steps_per_generation 16").notes if "sampled together" in n)
    assert told == "--steps_per_generation: 2 steps are sampled together, and ratios are to the engine's logprobs"
    assert not any("sampled together" in note for note in translated(f"{SERVER} --steps_per_generation 8").notes)
    told = translated("--reward_funcs cosine --cosine_max_len 511").notes
    assert any(note.startswith("--cosine_max_len: a longer answer gets what one of that length") for note in told)
    told = translated("--reward_funcs cosine --cosine_max_len 512").notes
    assert not any(note.startswith("--cosine_max_len") for note in told)


def test_a_default_in_the_wrong_place_is_told() -> None:
    """As command lines of the other mode often say it."""
    found = translated(f"{SERVER} --sleep_level 0 --vllm_tensor_parallel_size 1")
    assert found.options == options(SERVER)
    for name in ("sleep_level", "vllm_tensor_parallel_size"):
        assert any(note.startswith(f"--{name}: changes nothing with --vllm_mode server") for note in found.notes)


def test_what_would_differ_is_told() -> None:
    assert (
        "--truncation_strategy: a prompt without room is an error here, not left out"
        in translated("--truncation_strategy delete").notes
    )
    told = translated("--beta 0 --kl_in_reward true").notes
    assert "--kl_in_reward: changes nothing with --beta 0, which has no penalty" in told


def test_a_documented_command_line_comes_to_a_run() -> None:
    """Every argument of ms-swift's own example of an external engine, on one GPU."""
    line = (
        f"{SERVER} --vllm_server_port 8000 {FULL} --torch_dtype bfloat16 --dataset d.jsonl#10 --num_train_epochs 3 "
        "--max_completion_length 2048 --per_device_train_batch_size 2 --per_device_eval_batch_size 4 "
        "--learning_rate 1e-6 --gradient_accumulation_steps 12 --save_total_limit 2 --logging_steps 1 "
        "--warmup_ratio 0.05 --dataloader_num_workers 4 --dataset_num_proc 4 --num_generations 8 --temperature 1.0 "
        "--top_p 0.9 --top_k 50 --deepspeed zero2 --log_completions true --num_iterations 1 --beta 0.04 "
        "--report_to tensorboard wandb --max_steps -1"
    )
    recipe = options(line)
    assert (recipe["steps"], recipe["groups_per_step"], recipe["optimizer"]["warmup_steps"]) == (10, 3, 1)
    check_pairs(from_options(recipe, ("sinks=[]",), Path("x")).config)


def test_mistakes_are_told_together_and_ranks_are_one() -> None:
    said = refusal("--optim lion --torch_dtype float16", {"NPROC_PER_NODE": "8"})
    assert said.startswith("the command line has 3 problems:")
    assert "NPROC_PER_NODE=8, of the environment: the trainer is one process" in said
    assert "--model: it is missing" in refusal("", start="--dataset d.jsonl --gradient_accumulation_steps 8")
    with pytest.raises(EnvError, match=r"there is no file e\.jsonl"):
        translated("--dataset e.jsonl --max_steps -1")


@pytest.mark.parametrize("name", ["NPROC_PER_NODE", "NNODES", "WORLD_SIZE", "NODE_RANK", "RANK", "LOCAL_RANK"])
def test_ranks_of_a_launcher_are_never_ignored(name: str) -> None:
    """Two trainers of one run would each believe to be the only one."""
    assert f"{name}=2, of the environment: the trainer is one process" in refusal("", {name: "2"})
    alone = {**dict.fromkeys(("NPROC_PER_NODE", "NNODES", "WORLD_SIZE"), "1"), "RANK": "0", name: ""}
    assert translated("", alone).options == options()


@pytest.mark.parametrize(
    ("line", "visible", "devices"),
    [
        ("--vllm_device auto", "0", None),
        ("--vllm_device auto --num_infer_workers 1", "4,7", ["7"]),
        ("--num_infer_workers 2", "1,2,3", ["2", "3"]),
        ("--num_infer_workers 1", "", None),
        ("", "0,1", None),
    ],
)
def test_an_engine_has_the_last_gpus_that_the_trainer_leaves(line: str, visible: str, devices: Any) -> None:
    found = translated(f"{FULL} {COLOCATE} {line}", {"CUDA_VISIBLE_DEVICES": visible}).options
    assert at(found, "engine.devices") == devices
    assert at(found, "sync.kind") == ("broadcast" if devices else "shared")


def test_columns_are_renamed() -> None:
    Path("r.jsonl").write_text('{"ask": "1+1=", "gold": "2"}\n')
    env = options('--dataset r.jsonl --columns {"ask":"query","gold":"solution"}')["env"]
    (task,) = SwiftDataset(**{name: value for name, value in env.items() if name != "kind"}).tasks("train")
    assert (task.prompt[0].content, task.answer, task.meta["solution"]) == ("1+1=", "2", "2")


# Deploying


def test_what_an_engine_is_deployed_with() -> None:
    found = swift.deploy(words(
        "--model m --host 0.0.0.0 --port 8001 --vllm_tensor_parallel_size 2 --vllm_data_parallel_size 2 --max_length 99"
        " "
        "--vllm_enable_lora true --vllm_max_lora_rank 4 --api_key k --torch_dtype float32 --infer_backend vllm"
    ))  # fmt: skip
    assert found.options == {
        "model": "m", "steps": 1, "env": "arithmetic",
        "trains": {"kind": "lora", "rank": 4, "target_modules": "all-linear"},
        "engine": {"kind": "vllm", "host": "0.0.0.0", "port": 8001, "gpu_memory_utilization": 0.9, "replicas": 2,
                   "tensor_parallel_size": 2, "api_key_variable": "TANDEM_SWIFT_API_KEY"},
        "sync": {"kind": "broadcast"}, "dtype": "float32", "seed": 42, "context": 99,
    }  # fmt: skip
    assert found.environ == {"TANDEM_SWIFT_API_KEY": "k"}
    plain = swift.deploy(words("--model m")).options
    assert (plain["trains"], plain["engine"]["host"]) == ({"kind": "full"}, "0.0.0.0")
    assert any("--host: whoever reaches this machine" in note for note in swift.deploy(words("--model m")).notes)
    assert not any("--host" in note for note in swift.deploy(words("--model m --api_key k")).notes)
    for recipe in (found.options, plain):
        check_pairs(from_options(recipe, (), Path("x")).config)
    with pytest.raises(ConfigError, match="--infer_backend"):
        swift.deploy(words("--model m --infer_backend pt"))
    assert "without --vllm_enable" in str(swift.deploy(words("--model m --vllm_max_lora_rank 4")).notes)


DEPLOYED: list[tuple[str, dict[str, Any]]] = [
    ("--torch_dtype float32", {"dtype": "float32"}),
    ("--seed 7", {"seed": 7}),
    ("--max_length 99", {"context": 99}),
    ("--host 127.0.0.1 --port 9", {"engine.host": "127.0.0.1", "engine.port": 9}),
    ("--max_logprobs 5", {"engine.args": {"max_logprobs": 5}}),
    ("--vllm_gpu_memory_utilization 0.5", {"engine.gpu_memory_utilization": 0.5}),
    ("--vllm_tensor_parallel_size 2", {"engine.tensor_parallel_size": 2}),
    ("--vllm_data_parallel_size 2", {"engine.replicas": 2}),
    ("--vllm_max_model_len 9", {"engine.max_model_len": 9}),
    ("--vllm_max_num_seqs 9", {"engine.max_num_seqs": 9}),
    ("--vllm_enforce_eager true", {"engine.enforce_eager": True}),
    ('--vllm_limit_mm_per_prompt {"image":0}', {"engine.limit_mm_per_prompt": {"image": 0}}),
    ("--vllm_enable_prefix_caching false", {"engine.enable_prefix_caching": False}),
    ("--vllm_enable_lora true --vllm_max_lora_rank 4 --target_modules q_proj",
     {"trains": {"kind": "lora", "rank": 4, "target_modules": ["q_proj"]}}),
    ('--vllm_engine_kwargs {"block_size":16}', {"engine.args": {"block_size": 16}}),
    ("--vllm_disable_custom_all_reduce true", {"engine.args": {"disable_custom_all_reduce": True}}),
    ("--vllm_disable_cascade_attn true", {"engine.args": {"disable_cascade_attn": True}}),
    ("--vllm_enable_expert_parallel true", {"engine.args": {"enable_expert_parallel": True}}),
    ("--api_key k", {"engine.api_key_variable": "TANDEM_SWIFT_API_KEY"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "changes"), DEPLOYED)
def test_every_argument_of_deploy_changes_the_engine(line: str, changes: dict[str, Any]) -> None:
    before, after = (swift.deploy(words(f"--model m {more}")).options for more in ("", line))
    assert {path: at(after, path) for path in changes} == changes
    assert {path: at(before, path) for path in changes} != changes


def test_every_argument_of_deploy_is_tried() -> None:
    tried = {name for line, _ in DEPLOYED for name in words(line)} | {"model", "infer_backend"}
    assert {a.name for a in DEPLOY if a.becomes} - tried == set()


@pytest.mark.parametrize("argument", [a for a in DEPLOY if not a.becomes], ids=lambda a: a.name)
def test_the_others_of_deploy_are_refused_or_told(argument: Any) -> None:
    value = {"whole": "3", "number": "0.3", "truth": "true", "mapping": '{"a":1}'}.get(argument.takes, "x")
    given = {"model": ["m"], argument.name: [value]}
    if argument.refused:
        with pytest.raises(ConfigError, match=f"--{argument.name}: refused: "):
            swift.deploy(given)
    else:
        assert f"--{argument.name}: changes nothing: {argument.idle}" in swift.deploy(given).notes


# Data and plug-ins


def test_rows_in_every_form() -> None:
    asked = {"role": "user", "content": "q"}
    said = {"role": "assistant", "content": "a"}
    assert row({"messages": [asked, said]}) == {
        "messages": [asked, said], "prompt": [asked], "solution": "a", "gold answer": "a",
    }  # fmt: skip
    for gold in (4, ["4", "four"], {"value": 4}):  # rewards get it as it is in the data
        found = row({"messages": [asked], "solution": gold, "answer": "5"})
        assert (found["solution"], found["gold answer"]) == (gold, str(gold))
    assert row({"query": "q", "response": "a"})["prompt"] == [asked]
    assert row({"query": "q", "response": "a"})["solution"] == "a"
    full = row({"query": "q", "history": [["q", "a"]], "system": "s", "answer": "x"})
    assert full["prompt"] == [{"role": "system", "content": "s"}, asked, said, asked]
    assert full["solution"] == "x"
    assert row({"prompt": [asked]})["gold answer"] == ""
    with pytest.raises(ValueError, match="it has images"):
        row({"query": "q", "images": ["a.png"]})
    with pytest.raises(ValueError, match="no messages"):
        row({"text": "q"})


def test_rows_are_tasks_with_their_columns() -> None:
    (first, *_) = SwiftDataset(path="d.jsonl", test_share=0.0, max_rows=3).tasks("train")
    assert (first.prompt[0].content, first.answer, first.meta["query"]) == ("0+2=", "2", "0+2=")
    assert SwiftDataset(path="d.jsonl", test_share=0.0, gold_reply="<{answer}>").check(first) == "<2>"


PLUGIN = """
from swift.plugin import ORM, orms, rm_plugins
from swift.utils import get_logger


class Long(ORM):
    def __call__(self, completions, solution, **columns):
        return [len(text) + len(gold) for text, gold in zip(completions, solution)]


orms["long"] = Long
"""


# The command line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main(["swift", *arguments])
        printed = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, printed.out, printed.err

    return call


def test_values_of_one_argument_may_follow_one_another() -> None:
    assert swift.repeated(["--dataset", "a", "b", "--beta", "1", "x=y"]) == [
        "--dataset", "a", "--dataset", "b", "--beta", "1", "x=y",
    ]  # fmt: skip
    assert swift.repeated(["--stop_words", "a=b", "c", "seed=1"]) == [
        "--stop_words", "a=b", "--stop_words", "c", "seed=1",
    ]  # fmt: skip


def test_show_prints_the_recipe(run: Run) -> None:
    code, out, err = run("rlhf", *START.split(), "--reward_weights", "-1", "--sleep_level", "1", *COLOCATE.split(),
                         "--dtype", "float32", "--show", "seed=3")  # fmt: skip
    assert (code, err) == (0, "")
    recipe = yaml.safe_load(out)
    assert (recipe["seed"], recipe["dtype"], recipe["rewards"]["accuracy"]["weight"]) == (3, "float32", -1.0)
    assert "# --sleep_level: trainer and engine hold one copy" in out
    code, out, _ = run("rollout", "--model", "m", "--show")
    assert (code, yaml.safe_load(out)["engine"]["port"]) == (0, 8000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", "0"), "sampling.temperature"),
        (("--top_p", "1.5"), "sampling.top_p"),
        (("sampling.top_p=2",), "sampling.top_p"),
    ],
)
def test_show_refuses_what_a_run_would(run: Run, words: tuple[str, ...], message: str) -> None:
    refused = [run("rlhf", *START.split(), *words, *show) for show in ((), ("--show",))]
    for code, out, err in refused:
        assert (code, out) == (2, "")
        assert message in err


def test_a_misspelt_argument_is_corrected(run: Run) -> None:
    code, _, err = run("rlhf", *START.split(), "--num_generation", "4")
    assert code == 2
    assert "No such option: --num_generation" in err
    assert "--num_generations" in err.replace("--num_generation ", "")


@pytest.mark.slow
def test_it_trains_and_writes_completions(run: Run, tiny_model: Path) -> None:
    Path("plugin.py").write_text(PLUGIN)
    code, out, err = run(
        "rlhf", "--rlhf_type", "grpo", "--model", str(tiny_model), "--torch_dtype", "float32", "--dataset", "d.jsonl",
        "--external_plugins", "plugin.py", "--reward_funcs", "long", "accuracy", "format", "--num_generations", "4",
        "--gradient_accumulation_steps", "8", "--max_completion_length", "6", "--max_steps", "2", "--top_k", "-1",
        "--top_p", "1", "--output_dir", "out", "--run_name", "run", "--logging_steps", "1", "threads=1",
    )  # fmt: skip
    assert code == 0, err
    assert "done: out/run" in out
    assert "--logging_steps: changes nothing: every step is written down" in err
    table = [json.loads(line) for line in Path("out/run/completions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in table] == [["1"] * 8, ["2"] * 8]
    for line in table:
        assert set(line) == {"step", "prompt", "completion", "long", "accuracy", "format", "advantages"}
        assert all("+2=" in prompt and "<|im_start|>" in prompt for prompt in line["prompt"])
        golds = [str(int(prompt.partition("+2=")[0].rpartition("\n")[2]) + 2) for prompt in line["prompt"]]
        sizes = [len(text) + len(gold) for text, gold in zip(line["completion"], golds, strict=True)]
        assert line["long"] == sizes
    sink = CompletionsFile()
    info = RunInfo(name="run", folder=Path("out/run"), steps=2, config={"model": str(tiny_model)}, resumed_step=1)
    writer = sink.open(info)
    assert [json.loads(line) for line in Path("out/run/completions.jsonl").read_text().splitlines()] == table[:1]
    writer.write(2, {})
    assert len(Path("out/run/completions.jsonl").read_text().splitlines()) == 1, "its rollouts are not written yet"
    writer.close()
    assert [json.loads(line) for line in Path("out/run/completions.jsonl").read_text().splitlines()] == table
    Path("out/run/completions.jsonl").write_text("")  # as a killed run leaves it that has saved its first step
    sink.open(info).close()
    assert [json.loads(line) for line in Path("out/run/completions.jsonl").read_text().splitlines()] == table[:1]
