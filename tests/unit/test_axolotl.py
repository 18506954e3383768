"""Every option of an Axolotl file: it changes the recipe, is told to change nothing, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import app as cli
from tandem.compat.axolotl.options import DATASET, GROUPS, TOP, TRL, VLLM
from tandem.compat.axolotl.templates import TEMPLATES
from tandem.config.loading import Loaded, load
from tandem.errors import ConfigError, RewardError, TandemError
from tandem.model.policy import load_tokenizer
from tandem.trainer.assemble import check_pairs

Read = Callable[..., Loaded]

REWARDS = """
def right(completions, answer, **columns):
    return [float(gold in completion[0]["content"]) for completion, gold in zip(completions, answer)]

def brief(completions, **columns):
    return [-float(len(completion[0]["content"])) for completion in completions]

def ask(cfg, *args, **kwargs):
    def change(row, tokenizer=None):
        return {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
    return change, {"remove_columns": ["question"]}
"""

FILE: dict[str, Any] = {
    "base_model": "m",
    "rl": "grpo",
    "datasets": [{"path": "rows.jsonl", "type": "axolotl_rewards.ask"}],
    "learning_rate": 1e-5,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_steps": 100,
    "trl": {"reward_funcs": ["axolotl_rewards.right"]},
}
"""The least that Axolotl takes, nearly."""

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
SERVER = {"use_vllm": True}
COLOCATE = {"use_vllm": True, "vllm_mode": "colocate"}


def laid(changes: dict[str, Any]) -> dict[str, Any]:
    """The least file with changes: options of a group by dotted path."""
    made = json.loads(json.dumps(FILE))
    for path, value in changes.items():
        group, _, name = path.rpartition(".")
        (made.setdefault(group, {}) if group else made)[name] = value
    return dict(made)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Load an Axolotl file that differs from the least one as the arguments say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "axolotl_rewards.py").write_text(REWARDS)
    lines = [json.dumps({"question": f"{n}?", "answer": str(n)}) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:4]))

    def call(changes: dict[str, Any] | None = None, *, serving: bool = False) -> Loaded:
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(laid(changes or {}), sort_keys=False))
        return load(tmp_path / "a.yaml", serving=serving)

    return call


def trl(**options: Any) -> dict[str, Any]:
    return {f"trl.{name}": value for name, value in options.items()}


def at(options: Any, path: str) -> Any:
    """A value of nested options; missing is "absent"."""
    for word in path.split("/"):
        if isinstance(options, list):
            options = options[int(word)]
        elif not isinstance(options, dict) or word not in options:
            return "absent"
        else:
            options = options[word]
    return options


def line_of(option: str) -> str:
    """Where the file that was read last has an option."""
    name = option.rpartition(".")[2]
    lines = Path("a.yaml").read_text().splitlines()
    return f"a.yaml:{next(n for n, line in enumerate(lines, 1) if line.strip().startswith(f'{name}:'))}"


def test_the_defaults_are_those_of_axolotl_and_trl(read: Read) -> None:
    loaded = read()
    assert isinstance(loaded.options, dict)
    options = dict(loaded.options)
    assert options.pop("env")["cfg"] == laid({})
    assert options == {
        "model": "m",
        "steps": 100,
        "rewards": {"axolotl_rewards.right": 1.0},
        "groups_per_step": 2,
        "group_size": 8,
        "sampling": {"max_tokens": 512},
        "flat_groups": "drop",
        "advantage": "grpo",
        "loss": {"kind": "grpo", "reduction": "token"},
        "old_logprobs": "recomputed",
        "optimizer": {"kind": "adamw", "lr": 1e-5, "schedule": "cosine", "warmup_steps": 3},
        "trains": {"kind": "full"},
        "engine": {"kind": "embedded"},
        "dtype": "bfloat16",
        "micro_batch_tokens": 4096,
        "evaluate": {"tasks": 0},
        "runs": "model-out",
    }
    told = "\n".join(loaded.notes)
    for option in ("trl.loss_type: dapo", "trl.max_completion_length: 512", "warmup_steps: 3"):
        assert option in told


SEQUENCE = {"kind": "sequence", "beyond": "mask", "high": 3.0}

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base_model": ({"base_model": "other"}, {"model": "other"}),
    "rl": ({"rl": "gdpo"}, {"advantage": "gdpo"}),
    "chat_template": (
        {"chat_template": "jinja", "chat_template_jinja": "{{ messages }}"},
        {"chat_template": "{{ messages }}"},
    ),
    "chat_template_jinja": (
        {"chat_template": "jinja", "chat_template_jinja": "{{ messages }}"},
        {"chat_template": "{{ messages }}"},
    ),
    "lora_target_linear": (LORA, {"trains/target_modules": "all-linear"}),
    "datasets": ({"datasets": [{"path": "few.jsonl"}], "max_steps": None}, {"steps": 2}),
    "adapter": (LORA, {"trains": {"kind": "lora", "rank": 8, "alpha": 16, "target_modules": "all-linear"}}),
    "lora_r": ({**LORA, "lora_r": 4}, {"trains/rank": 4}),
    "lora_alpha": ({**LORA, "lora_alpha": 4}, {"trains/alpha": 4}),
    "lora_target_modules": (
        {**LORA, "lora_target_linear": False, "lora_target_modules": ["q_proj"]},
        {"trains/target_modules": ["q_proj"]},
    ),
    "peft_layers_to_transform": ({**LORA, "peft_layers_to_transform": [1]}, {"trains/layers": [1]}),
    "val_set_size": ({"val_set_size": 0.2}, {"evaluate": "absent", "env/cfg/val_set_size": 0.2}),
    "test_datasets": ({"test_datasets": [{"path": "rows.jsonl"}]}, {"evaluate": "absent"}),
    "eval_steps": ({"val_set_size": 0.2, "eval_steps": 10}, {"evaluate": {"every": 10}}),
    "evals_per_epoch": ({"val_set_size": 0.2, "evals_per_epoch": 5}, {"evaluate": {"every": 20}}),
    "sequence_len": ({"sequence_len": 1024}, {"micro_batch_tokens": 8192}),
    "micro_batch_size": ({"micro_batch_size": 4}, {"groups_per_step": 1, "micro_batch_tokens": 2048}),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 4}, {"groups_per_step": 4}),
    "max_steps": ({"max_steps": 7}, {"steps": 7, "optimizer/warmup_steps": 1}),
    "num_epochs": ({"max_steps": None, "num_epochs": 1.5}, {"steps": 30}),
    "learning_rate": ({"learning_rate": 0.5}, {"optimizer/lr": 0.5}),
    "optimizer": ({"optimizer": "adamw_bnb_8bit"}, {"optimizer/kind": "adamw8bit"}),
    "lr_scheduler": ({"lr_scheduler": "linear"}, {"optimizer/schedule": "linear"}),
    "cosine_min_lr_ratio": ({"cosine_min_lr_ratio": 0.1}, {"optimizer/min_lr_ratio": 0.1}),
    "warmup_steps": ({"warmup_steps": 10}, {"optimizer/warmup_steps": 10}),
    "warmup_ratio": ({"warmup_ratio": 0.201}, {"optimizer/warmup_steps": 21}),
    "weight_decay": ({"weight_decay": 0.1}, {"optimizer/weight_decay": 0.1}),
    "adam_beta1": ({"adam_beta1": 0.8}, {"optimizer/beta1": 0.8}),
    "adam_beta2": ({"adam_beta2": 0.95}, {"optimizer/beta2": 0.95}),
    "adam_epsilon": ({"adam_epsilon": 1e-6}, {"optimizer/eps": 1e-6}),
    "max_grad_norm": ({"max_grad_norm": 0.1}, {"optimizer/max_grad_norm": 0.1}),
    "bf16": ({"bf16": False}, {"dtype": "float32"}),
    "float32": ({"float32": True}, {"dtype": "float32"}),
    "fp8": ({"fp8": True}, {"matmul": "fp8"}),
    "torch_compile": ({"torch_compile": True}, {"compile": True}),
    "gradient_checkpointing": ({"gradient_checkpointing": True}, {"checkpointing": "full"}),
    "output_dir": ({"output_dir": "o"}, {"runs": "o"}),
    "logging_steps": (
        {"logging_steps": 5, **trl(log_completions=True)},
        {"print_completions": {"every": 5, "count": None}},
    ),
    "trl.log_completions": (trl(log_completions=True), {"print_completions": {"every": 1, "count": None}}),
    "trl.num_completions_to_print": (
        trl(log_completions=True, num_completions_to_print=3),
        {"print_completions": {"every": 1, "count": 3}},
    ),
    "save_steps": ({"save_steps": 9}, {"checkpoint": {"every": 9}}),
    "saves_per_epoch": ({"saves_per_epoch": 10}, {"checkpoint": {"every": 10}}),
    "save_total_limit": ({"save_total_limit": 3}, {"checkpoint": {"keep": 3}}),
    "seed": ({"seed": 42}, {"seed": 42}),
    "wandb_project": ({"wandb_project": "p"}, {"sinks": ["console", {"kind": "wandb", "project": "p"}]}),
    "wandb_entity": ({"wandb_project": "p", "wandb_entity": "e"}, {"sinks/1/entity": "e"}),
    "wandb_mode": ({"wandb_project": "p", "wandb_mode": "disabled"}, {"sinks": "absent"}),
    "wandb_name": ({"wandb_name": "n"}, {"name": "n"}),
    "use_wandb": ({"use_wandb": True}, {"sinks": ["console", {"kind": "wandb"}]}),
    "use_trackio": ({"use_trackio": True}, {"sinks": ["console", {"kind": "trackio"}]}),
    "trackio_project_name": ({"use_trackio": True, "trackio_project_name": "p"}, {"sinks/1/project": "p"}),
    "trackio_space_id": ({"use_trackio": True, "trackio_space_id": "o/s"}, {"sinks/1/space": "o/s"}),
    "use_tensorboard": ({"use_tensorboard": True}, {"sinks": ["console", "tensorboard"]}),
    "trl.use_vllm": (
        trl(use_vllm=True),
        {
            "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:8000"], "start_seconds": 240.0},
            "sync": {"kind": "broadcast"},
        },
    ),
    "trl.vllm_mode": (
        trl(**COLOCATE),
        {"engine": {"kind": "vllm", "gpu_memory_utilization": 0.3}, "sync": {"kind": "shared"}},
    ),
    "trl.vllm_enable_sleep_mode": (
        {**trl(**COLOCATE, vllm_enable_sleep_mode=True), "vllm.tensor_parallel_size": 2},
        {"engine/sleep": 2, "sync": {"kind": "broadcast"}},
    ),
    "trl.vllm_server_host": (trl(**SERVER, vllm_server_host="far"), {"engine/urls": ["http://far:8000"]}),
    "trl.vllm_server_port": (trl(**SERVER, vllm_server_port=7), {"engine/urls": ["http://127.0.0.1:7"]}),
    "trl.vllm_server_timeout": (trl(**SERVER, vllm_server_timeout=7), {"engine/start_seconds": 7}),
    "trl.vllm_gpu_memory_utilization": (
        trl(**COLOCATE, vllm_gpu_memory_utilization=0.7),
        {"engine/gpu_memory_utilization": 0.7},
    ),
    "trl.vllm_enable_prefix_caching": (
        trl(**COLOCATE, vllm_enable_prefix_caching=False),
        {"engine/enable_prefix_caching": False},
    ),
    "trl.vllm_max_model_len": (trl(**SERVER, vllm_max_model_len=99), {"context": 99}),
    "trl.num_generations": (trl(num_generations=4), {"group_size": 4, "groups_per_step": 4}),
    "trl.generation_batch_size": (
        trl(generation_batch_size=48, epsilon=0.1, epsilon_high=0.3),
        {"max_lag": 2, "old_logprobs": "sampled", "loss/clip_low": 0.1, "loss/clip_high": 0.3, "loss/dual_clip": None},
    ),
    "trl.max_completion_length": (trl(max_completion_length=64), {"sampling/max_tokens": 64}),
    "trl.beta": (trl(beta=0.1), {"reference": {"kind": "start", "beta": 0.1, "ratio_corrected": True}}),
    "trl.num_iterations": (
        {**trl(num_iterations=3), "warmup_steps": 10},
        {
            "updates": 3,
            "steps": 34,
            "optimizer/warmup_steps": 4,
            "loss": {"kind": "grpo", "reduction": "token", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        },
    ),
    "trl.epsilon": (trl(num_iterations=2, epsilon=0.1), {"loss/clip_low": 0.1, "loss/clip_high": 0.1}),
    "trl.epsilon_high": (trl(num_iterations=2, epsilon_high=0.3), {"loss/clip_low": 0.2, "loss/clip_high": 0.3}),
    "trl.loss_type": (trl(loss_type="grpo"), {"loss/reduction": "sequence"}),
    "trl.scale_rewards": (trl(scale_rewards=False), {"advantage": "dr_grpo"}),
    "trl.mask_truncated_completions": (trl(mask_truncated_completions=True), {"truncated": "mask"}),
    "trl.rollout_func": (
        {**trl(rollout_func="axolotl_rewards.play"), "chat_template": "chatml"},
        {
            "env/kind": "tandem.compat.axolotl.rollout:RolloutFunction",
            "env/rollout_func": "axolotl_rewards.play",
            "env/chat_template": TEMPLATES["chatml"],
            "rewards": {
                "axolotl_rewards.right": {
                    "kind": "tandem.compat.axolotl.rollout:ReturnedText",
                    "path": "axolotl_rewards.right",
                    "weight": 1.0,
                }
            },
        },
    ),
    "trl.reward_funcs": (
        trl(reward_funcs=["some/model", "axolotl_rewards.brief", "other/model"]),
        {
            "rewards/reward_model": {"kind": "reward_model", "weight": 1.0, "model": "some/model"},
            "rewards/axolotl_rewards.brief": 1.0,
            "rewards/reward_model_2/model": "other/model",
        },
    ),
    "trl.reward_weights": (trl(reward_weights=[0.25]), {"rewards": {"axolotl_rewards.right": 0.25}}),
    "trl.multi_objective_aggregation": (trl(multi_objective_aggregation="normalize_then_sum"), {"advantage": "gdpo"}),
    "trl.temperature": (trl(temperature=0.7), {"sampling/temperature": 0.7}),
    "trl.top_p": (trl(top_p=0.9), {"sampling/top_p": 0.9}),
    "trl.top_k": (trl(top_k=5), {"sampling/top_k": 5}),
    "trl.min_p": (trl(min_p=0.1), {"sampling/min_p": 0.1}),
    "trl.repetition_penalty": (trl(repetition_penalty=1.1), {"sampling/repetition_penalty": 1.1}),
    "trl.generation_kwargs": (
        trl(top_p=0.9, generation_kwargs={"stop": "END", "top_p": 0.8, "presence_penalty": 0.5, "seed": 3}),
        {"sampling/stop": ["END"], "sampling/top_p": 0.8, "sampling/presence_penalty": 0.5},
    ),
    "trl.vllm_guided_decoding_regex": (
        trl(**SERVER, vllm_guided_decoding_regex="[0-9]+"),
        {"sampling/regex": "[0-9]+", "old_logprobs": "recomputed"},
    ),
    "trl.chat_template_kwargs": (
        trl(chat_template_kwargs={"enable_thinking": False}),
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    "trl.use_data_producer": (
        trl(**SERVER, use_data_producer=True, beta=0.1),
        {"corrections": [{"kind": "token", "beyond": "truncate", "high": 3.0}], "reference/ratio_corrected": False},
    ),
    "trl.async_prefetch": (
        trl(**SERVER, async_prefetch=True),
        {"max_lag": 1, "corrections": [{"kind": "token", "beyond": "truncate", "high": 3.0}]},
    ),
    "trl.prefetch_depth": (trl(use_data_producer=True, async_prefetch=True, prefetch_depth=3), {"max_lag": 3}),
    "trl.vllm_sync_interval": (trl(**SERVER, vllm_sync_interval=5), {"sync/every": 5, "max_lag": 4}),
    "trl.vllm_lora_sync": ({**LORA, **trl(**SERVER, vllm_lora_sync=True)}, {"sync": {"kind": "hotswap"}}),
    "trl.skip_zero_advantage_batches": (trl(skip_zero_advantage_batches=False), {"flat_groups": "keep"}),
    "trl.replay_buffer_size": (
        trl(**SERVER, replay_buffer_size=64),
        {"replay": {"size": 64}, "old_logprobs": "recomputed", "corrections": [SEQUENCE]},
    ),
    "trl.replay_recompute_logps": (
        trl(replay_buffer_size=64, replay_recompute_logps=False, epsilon=0.1),
        {"replay": {"size": 64}, "old_logprobs": "sampled", "loss/clip_low": 0.1, "loss/clip_high": 0.1},
    ),
    "trl.reroll_start_fraction": (trl(reroll_start_fraction=0.5), {"reroll": {"start_fraction": 0.5}}),
    "trl.reroll_max_groups": (
        trl(reroll_start_fraction=0.5, reroll_max_groups=3),
        {"reroll": {"start_fraction": 0.5, "max_groups": 3}},
    ),
    "trl.reward_num_workers": (trl(reward_num_workers=4), {"grading": {"workers": 4}}),
    "trl.vllm_importance_sampling_correction": (
        trl(**SERVER, vllm_importance_sampling_correction=False),
        {"corrections": "absent"},
    ),
    "trl.vllm_importance_sampling_mode": (
        trl(**SERVER, vllm_importance_sampling_mode="token_mask"),
        {"corrections": [{"kind": "token", "beyond": "mask", "high": 3.0}]},
    ),
    "trl.vllm_importance_sampling_cap": (
        trl(**SERVER, vllm_importance_sampling_cap=2.0),
        {"corrections": [{**SEQUENCE, "high": 2.0}]},
    ),
    "trl.vllm_importance_sampling_clip_max": (
        trl(**SERVER, vllm_importance_sampling_clip_max=2.0),
        {"corrections": [{**SEQUENCE, "high": 2.0}]},
    ),
    "trl.vllm_importance_sampling_clip_min": (
        trl(**SERVER, vllm_importance_sampling_clip_min=0.5),
        {"corrections": [{**SEQUENCE, "low": 0.5}]},
    ),
    "trl.importance_sampling_level": (trl(importance_sampling_level="sequence"), {"loss/kind": "gspo"}),
    "trl.off_policy_mask_threshold": (
        trl(**SERVER, off_policy_mask_threshold=0.5),
        {"corrections": [SEQUENCE, {"kind": "opsm", "threshold": 0.5}]},
    ),
    "trl.use_bias_correction_kl": (
        trl(beta=0.1, use_bias_correction_kl=False),
        {"reference/ratio_corrected": False},
    ),
    "trl.sync_ref_model": (
        trl(beta=0.1, sync_ref_model=True),
        {"reference/kind": "average", "reference/mixup": 0.9, "reference/every": 64},
    ),
    "trl.ref_model_mixup_alpha": (
        trl(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.6),
        {"reference/mixup": 0.6},
    ),
    "trl.ref_model_sync_steps": (trl(beta=0.1, sync_ref_model=True, ref_model_sync_steps=8), {"reference/every": 8}),
    "vllm.gpu_memory_utilization": (
        {**trl(**COLOCATE), "vllm.gpu_memory_utilization": 0.6},
        {"engine/gpu_memory_utilization": 0.6},
    ),
    "vllm.max_model_len": ({**trl(**SERVER), "vllm.max_model_len": 99}, {"context": 99}),
    "vllm.enforce_eager": ({**trl(**COLOCATE), "vllm.enforce_eager": True}, {"engine/enforce_eager": True}),
    "vllm.enable_prefix_caching": (
        {**trl(**COLOCATE), "vllm.enable_prefix_caching": False},
        {"engine/enable_prefix_caching": False},
    ),
}
"""By option: a file that sets it, and what of the recipe is then otherwise."""


BEFORE = {
    "wandb_mode": {"wandb_project": "p"},
    "trl.vllm_importance_sampling_correction": trl(**SERVER),
    "chat_template_jinja": {"chat_template": "jinja", "chat_template_jinja": "other"},
    "lora_target_linear": {**LORA, "lora_target_linear": False, "lora_target_modules": ["q_proj"]},
    "datasets": {"max_steps": None},
}
"""Files without the option, where the least file would do as the option says."""


@pytest.mark.slow
@pytest.mark.parametrize("option", CHANGES)
def test_it_changes_the_recipe(option: str, read: Read) -> None:
    changes, expected = CHANGES[option]
    assert option in laid(changes) or option.rpartition(".")[2] in laid(changes)[option.rpartition(".")[0]]
    before, after = read(BEFORE.get(option)).options, read(changes).options
    assert {path: at(after, path) for path in expected} == expected
    assert {path: at(before, path) for path in expected} != expected


SERVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "vllm.host": ("10.0.0.1", {"engine/host": "10.0.0.1"}),
    "vllm.port": (8123, {"engine/port": 8123}),
    "vllm.tensor_parallel_size": (2, {"engine/tensor_parallel_size": 2}),
    "vllm.data_parallel_size": (2, {"engine/replicas": 2}),
    "vllm.gpu_memory_utilization": (0.5, {"engine/gpu_memory_utilization": 0.5}),
    "vllm.enforce_eager": (True, {"engine/enforce_eager": True}),
    "vllm.enable_prefix_caching": (False, {"engine/enable_prefix_caching": False}),
    "vllm.max_model_len": (99, {"context": 99}),
}
"""By option of the server: a value, and what of the recipe of ``tandem serve engine`` is then otherwise."""


@pytest.mark.parametrize("option", SERVED)
def test_it_changes_the_server(option: str, read: Read) -> None:
    value, expected = SERVED[option]
    before, after = (read({**trl(**SERVER), **more}, serving=True).options for more in ({}, {option: value}))
    assert {path: at(after, path) for path in expected} == expected
    assert {path: at(before, path) for path in expected} != expected


MUST = {
    "rl": "dpo",
    "tokenizer_config": "other",
    "special_tokens": {"eos_token": "<none>"},
    "trl.vllm_dtype": "float16",
    "vllm.dtype": "float16",
    "datasets": [{"path": "rows.jsonl", "ds_type": "csv"}],
}
"""By option that becomes nothing, since one value alone is possible: another."""


@pytest.mark.parametrize("option", MUST)
def test_another_value_is_refused_where_it_was_written(option: str, read: Read) -> None:
    with pytest.raises(TandemError) as refused:
        read({option: MUST[option], **({"max_steps": None} if option == "datasets" else {})})
    assert "a.yaml" in str(refused.value)
    assert line_of(option) in str(refused.value) or option == "datasets"


def test_what_is_replayed_is_weighed_one_way_or_the_other(read: Read) -> None:
    alone = read(trl(replay_buffer_size=8))
    assert {path: at(alone.options, path) for path in ("old_logprobs", "corrections")} == {
        "old_logprobs": "sampled", "corrections": "absent"
    }  # fmt: skip
    assert "ratios are to the sampler's logprobs: replayed answers are of an older policy" in " ".join(alone.notes)
    told = " ".join(read(trl(replay_recompute_logps=False, reroll_max_groups=2)).notes)
    assert "trl.replay_recompute_logps: changes nothing: nothing is replayed" in told
    assert "trl.reroll_max_groups: changes nothing: reroll_start_fraction is 1" in told


def every() -> list[tuple[str, Any]]:
    return [(f"{group}.{name}".lstrip("."), o) for group, options in GROUPS.items() for name, o in options.items()]


def test_every_option_that_becomes_something_is_tried() -> None:
    tried = {*CHANGES, *SERVED, "trl", "vllm"}  # groups are what is in them; of an entry see test_axolotl_data
    untried = {path for path, option in every() if option.becomes} - tried - {f"datasets.{name}" for name in DATASET}
    assert untried - set(MUST) == set()
    assert {path for path in untried if not dict(every())[path].becomes.startswith("nothing")} == set()


def test_every_option_of_axolotls_own_schema_is_known() -> None:
    """Names as Axolotl 0.21 declares them."""
    assert set(SCHEMA["trl"].split()) <= set(TRL)
    assert set(SCHEMA["vllm"].split()) <= set(VLLM)


SCHEMA = {
    "trl": """beta max_completion_length use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_timeout
        vllm_guided_decoding_regex reward_funcs reward_weights generation_batch_size num_generations log_completions
        num_completions_to_print importance_sampling_level sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        scale_rewards temperature top_p top_k min_p repetition_penalty generation_kwargs chat_template_kwargs
        num_iterations epsilon epsilon_high use_liger_loss loss_type mask_truncated_completions vllm_enable_sleep_mode
        rollout_func multi_objective_aggregation entropy_coef use_adaptive_entropy entropy_target entropy_coef_delta
        entropy_coef_min entropy_coef_max use_data_producer async_prefetch prefetch_depth vllm_sync_interval
        streaming_partial_batch streaming_min_groups vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_importance_sampling_cap vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max
        off_policy_mask_threshold use_bias_correction_kl log_multimodal reward_num_workers replay_buffer_size
        replay_recompute_logps reroll_start_fraction reroll_max_groups skip_zero_advantage_batches vllm_lora_sync""",
    "vllm": """device tensor_parallel_size data_parallel_size gpu_memory_utilization dtype max_model_len
        enable_prefix_caching host port enable_reasoning reasoning_parser enforce_eager serve_module
        worker_extension_cls""",
}


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p, o in every() if o.refused and not p.startswith("datasets.")])
def test_it_is_refused_by_name(path: str, read: Read) -> None:
    option = dict(every())[path]
    with pytest.raises(ConfigError) as refused:
        read({path: "something"})
    assert f"{line_of(path)}: {path}: it cannot be 'something' here: {option.refused}" in str(refused.value)
    for off in (None, *option.off):
        assert read({path: off}).options is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p, o in every() if o.idle])
def test_it_is_told_to_change_nothing(path: str, read: Read) -> None:
    option = dict(every())[path]
    plain, loaded = read(), read({path: "something"})
    assert set(loaded.notes) - set(plain.notes) == {f"{path}: changes nothing: {option.idle}"}
    assert {**loaded.options, "env": None} == {**plain.options, "env": None}  # type: ignore[dict-item]
    for off in (None, *option.off):
        assert read({path: off}).notes == plain.notes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qlora": ({"adapter": "qlora"}, "adapter: qlora is not trained here"),
    "a half LoRA": ({"adapter": "lora", "lora_target_linear": True}, "adapter: lora needs lora_r"),
    "no modules": ({**LORA, "lora_target_linear": False}, "adapter: lora needs lora_target_linear"),
    "a module pattern": (
        {**LORA, "lora_target_linear": False, "lora_target_modules": ".*q"},
        "expected a list of names",
    ),
    "another tokenizer": ({"tokenizer_config": "x"}, "tokenizer_config: the tokenizer is the model's own, m"),
    "a template": ({"chat_template": "exaone"}, "chat_template: there is no exaone here"),
    "no template": ({"chat_template": "jinja"}, "jinja needs the template in chat_template_jinja"),
    "an idle template": ({"chat_template_jinja": "x"}, "it is read with chat_template: jinja alone"),
    "bf16": ({"bf16": "maybe"}, "bf16: expected true, false, auto or full"),
    "checkpointing": ({"gradient_checkpointing": "some"}, "expected true, false or offload"),
    "the server's type": (
        {"vllm.dtype": "float16"},
        "vllm.dtype: the engine samples from the weights that are trained",
    ),
    "the engine's type": (trl(vllm_dtype="float16"), "trl.vllm_dtype: the engine samples from"),
    "groups": (trl(num_generations=5), "trl.num_generations: a step has micro_batch_size 8 x gradient_acc"),
    "no batch": ({"micro_batch_size": 0}, "micro_batch_size: it must be at least 1"),
    "generation": (trl(generation_batch_size=12), "12 is no multiple of both num_generations 8 and micro"),
    "half a step, twice": (
        trl(generation_batch_size=8, num_iterations=2),
        "trl.generation_batch_size: with 8 of a step's 16 completions and num_iterations 2 a step would train the same",
    ),
    "a share of steps above 1": ({"save_steps": 1.5}, "save_steps: expected a number of steps, or a share of all"),
    "saves below 0": ({"saves_per_epoch": -2}, "saves_per_epoch: expected how often in an epoch, got -2"),
    "saves both ways": ({"save_steps": 5, "saves_per_epoch": 1}, "saves_per_epoch: Axolotl takes it or save_steps"),
    "steps below 0": ({"val_set_size": 0.2, "eval_steps": -1}, "eval_steps: expected a number of steps, or a share"),
    "a part of a step": (trl(generation_batch_size=24), "24 is no multiple of the 16 completions of a step"),
    "an optimizer": ({"optimizer": "muon"}, "optimizer: there is no muon here"),
    "a schedule": ({"lr_scheduler": "rex"}, "lr_scheduler: there is no rex here"),
    "weights": (trl(reward_weights=[1.0, 2.0]), "1 reward_funcs need 1 weights, and there are 2"),
    "no rewards": (trl(reward_funcs=[]), "trl.reward_funcs: name at least one function"),
    "a reward twice": (trl(reward_funcs=["a.b", "a.b"]), "a.b is given twice"),
    "generation_kwargs": (
        trl(generation_kwargs={"bad_words": ["x"]}),
        "trl.generation_kwargs: bad_words: it changes probabilities by what the trainer does not see",
    ),
    "unknown generation_kwargs": (
        trl(generation_kwargs={"topp": 1}),
        "trl.generation_kwargs: topp is no field of vLLM's SamplingParams; did you mean 'top_p'?",
    ),
    "generation_kwargs out of range": (trl(generation_kwargs={"top_p": 3}), "sampling.top_p must be above 0"),
    "scale_rewards": (trl(scale_rewards="some"), "expected true, false, group, batch or none"),
    "aggregation": (trl(multi_objective_aggregation="sum"), "expected sum_then_normalize or"),
    "loss_type": (trl(loss_type="ppo"), "trl.loss_type: expected one of grpo, bnpo, dapo, dr_grpo, cispo, sapo"),
    "cispo's level": (
        trl(loss_type="cispo", importance_sampling_level="sequence"),
        "trl.importance_sampling_level: of cispo ratios are the token's",
    ),
    "level": (trl(importance_sampling_level="word"), "expected token or sequence, got word"),
    "mode": (trl(**SERVER, vllm_importance_sampling_mode="word_mask"), "expected token_truncate, token_mask"),
    "a moving reference of no weight": (trl(sync_ref_model=True), "it needs a penalty: set trl.beta above 0"),
    "a reference that never moves": (trl(beta=0.1, sync_ref_model=True, ref_model_sync_steps=100), "reference.every"),
    "no depth": (trl(async_prefetch=True, prefetch_depth=0), "trl.prefetch_depth: it must be at least 1"),
    "two bounds": (
        trl(**SERVER, vllm_importance_sampling_cap=2.0, vllm_importance_sampling_clip_max=2.0),
        "trl.vllm_importance_sampling_cap: vllm_importance_sampling_clip_max is its newer name",
    ),
    "two warm-ups": ({"warmup_steps": 2, "warmup_ratio": 0.1}, "warmup_ratio: Axolotl takes it or warmup_steps"),
    "NeMo Gym": (
        {"nemo_gym_enabled": True},
        "nemo_gym_enabled: it cannot be true here: NeMo Gym's servers are not asked",
    ),
    "groups of one": (trl(num_generations=1), "trl.num_generations: it must be at least 2"),
    "adapters without a server": (
        {**LORA, **trl(**COLOCATE, vllm_lora_sync=True)},
        "trl.vllm_lora_sync: it needs vllm_mode: server",
    ),
    "lora sync": (trl(**SERVER, vllm_lora_sync=True), "it needs adapter: lora"),
    "vllm_mode": (trl(**SERVER, vllm_mode="both"), "expected server or colocate, got both"),
    "iterations": (trl(num_iterations=0), "trl.num_iterations: it must be at least 1"),
    "a type": (trl(temperature="hot"), "trl.temperature: expected a number, got 'hot'"),
    "a truth as number": (trl(num_generations=True), "trl.num_generations: expected a whole number, got true"),
    "out of range": ({"learning_rate": -1.0}, "optimizer.lr"),
    "no such option": ({"lora_rr": 3}, "lora_rr is no option of Axolotl's that Tandem knows; did you mean 'lora_r'?"),
    "in the wrong group": ({"beta": 0.1}, "beta is no option of Axolotl's that Tandem knows; it belongs in trl"),
    "no such thing at all": (trl(zzz=1), "trl.zzz is no option of Axolotl's that Tandem knows; leave it out"),
    "no rate": ({"learning_rate": None}, "missing 'learning_rate'"),
    "no data": ({"datasets": None}, "missing 'datasets'"),
    "a type of prompt": ({"datasets": [{"path": "rows.jsonl", "type": "alpaca"}]}, "type must be a transform's"),
    "an option of data": ({"datasets": [{"path": "rows.jsonl", "shards": 3}]}, "datasets[0].shards: it cannot be 3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what: str, read: Read) -> None:
    changes, message = REFUSED[what]
    with pytest.raises(TandemError) as refused:
        read(changes)
    assert message in str(refused.value)


@pytest.mark.parametrize("changes", [{"rl": "dpo"}, {"rl": None}], ids=["another", "none"])
def test_another_method_is_refused(changes: dict[str, Any], read: Read) -> None:
    with pytest.raises(ConfigError, match=r"of those Tandem trains the ones with rl: grpo or gdpo$"):
        read(changes)


def test_ranks_of_a_launcher_are_never_ignored(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers of one run would each believe to be the only one; a server has nothing to do with them."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2, of the environment: the trainer is one process"):
        read()
    assert read(trl(**SERVER), serving=True).options
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert read().options


def test_mistakes_name_their_lines(read: Read) -> None:
    """Also those that Tandem finds in what the file came to."""
    for option, changes in {"temperature": trl(temperature=0.0), "weight_decay": {"weight_decay": -1.0}}.items():
        with pytest.raises(ConfigError) as refused:
            read(changes)
        assert f"{line_of(option)}: " in str(refused.value)
    with pytest.raises(RewardError, match="axolotl_rewards"):
        read(trl(reward_funcs=["axolotl_rewards.none"]))


def test_leftovers_are_told(read: Read) -> None:
    top = {"lora_r": 8, "peft_layers_to_transform": [0], "eval_steps": 5, "wandb_entity": "e", "wandb_mode": "offline"}
    told = "\n".join(read({**top, "vllm.port": 1, **trl(epsilon=0.3, prefetch_depth=2)}).notes)
    told += "\n".join(read(trl(**COLOCATE, vllm_enable_sleep_mode=True, vllm_server_timeout=9)).notes)
    told += "\n".join(read(trl(**SERVER, vllm_enable_sleep_mode=True)).notes)
    for start in (
        "trl.vllm_enable_sleep_mode: changes nothing: shared weights are one copy",
        "trl.vllm_enable_sleep_mode: changes nothing with vllm_mode: server",
        "lora_r: changes nothing without adapter: lora",
        "peft_layers_to_transform: changes nothing without adapter: lora",
        "eval_steps: changes nothing: val_set_size and test_datasets hold no rows out",
        "wandb_entity: changes nothing without wandb_project or use_wandb",
        "wandb_mode: changes nothing without wandb_project or use_wandb",
        "trl.vllm_server_timeout: changes nothing with vllm_mode: colocate",
        "vllm.port: changes nothing: trl.use_vllm is false",
        "trl.epsilon: changes nothing: with num_iterations 1",
        "trl.prefetch_depth: changes nothing without async_prefetch",
    ):
        assert start in told


def test_answers_are_not_shown_where_the_file_says_so(read: Read) -> None:
    assert at(read(trl(log_completions=False)).options, "print_completions") == {"every": 0}
    loaded = read({"logging_steps": 5, **trl(num_completions_to_print=3)})
    assert at(loaded.options, "print_completions") == "absent"
    assert "trl.num_completions_to_print: changes nothing without log_completions: true" in loaded.notes
    assert "logging_steps: changes nothing: every step is logged" in loaded.notes


def test_what_is_sampled_together_is_of_an_older_policy(read: Read) -> None:
    """TRL clips ratios to the policy of the generation: here that is the sampler, and nothing else weighs it."""
    without = trl(**SERVER, vllm_importance_sampling_correction=False, epsilon=0.1, generation_batch_size=32)
    for changes in (trl(generation_batch_size=32, epsilon=0.1), without):
        loaded = read(changes)
        expected = {"old_logprobs": "sampled", "corrections": "absent", "max_lag": 1, "loss/clip_low": 0.1}
        assert {path: at(loaded.options, path) for path in expected} == expected
        assert not [note for note in loaded.notes if "epsilon" in note]
        assert "2 steps are sampled together, and ratios are to the sampler's" in "\n".join(loaded.notes)
    for changes in (trl(generation_batch_size=16), trl(generation_batch_size=8), trl(**SERVER)):
        assert at(read(changes).options, "old_logprobs") == "recomputed"


def test_ratios_to_the_sampler_hold_what_the_correction_weighs(read: Read) -> None:
    """The default correction masks by them still; one that truncates them is left out, and told."""
    stale = trl(**SERVER, replay_buffer_size=8, replay_recompute_logps=False, epsilon=0.1)
    for changes in (trl(**SERVER, generation_batch_size=32, epsilon=0.1), stale):
        loaded = read(changes)
        expected = {"old_logprobs": "sampled", "corrections": [SEQUENCE], "loss/clip_low": 0.1}
        assert {path: at(loaded.options, path) for path in expected} == expected
        check_pairs(loaded.config)
        loaded = read({**changes, "trl.vllm_importance_sampling_mode": "token_truncate"})
        assert at(loaded.options, "corrections") == "absent"
        assert "trl.vllm_importance_sampling_mode: token_truncate is left out: ratios to the" in "\n".join(loaded.notes)
        check_pairs(loaded.config)


def test_what_trl_computes_otherwise_is_told_where_it_matters(read: Read) -> None:
    told = {
        "trl.top_p: logprobs are those of the tokens that may be sampled": trl(top_p=0.9),
        "trl.top_k: logprobs are those of the tokens that may be sampled": trl(top_k=50),
        "trl.mask_truncated_completions: with dr_grpo the loss is divided by the answers that are left": trl(
            mask_truncated_completions=True, loss_type="dr_grpo"
        ),
        "trl.importance_sampling_level: use_bias_correction_kl weighs each token's KL by its own ratio": trl(
            importance_sampling_level="sequence", beta=0.1
        ),
    }
    for start, changes in told.items():
        assert start in "\n".join(read(changes).notes)
    plain = "\n".join(read({**trl(top_p=1.0, top_k=-1, mask_truncated_completions=True)}).notes)
    assert not any(start in plain for start in told)
    assert "trl.reward_funcs: an answer of which every reward is None is left out; in TRL it counts as 0" in plain
    weightless = trl(importance_sampling_level="sequence", beta=0.1, use_bias_correction_kl=False)
    assert "weighs each token's KL" not in "\n".join(read(weightless).notes)


SPOKEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
    "qwen_25": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n",
    "phi_3": "<s><|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n",
    "phi_35": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n",
    "alpaca": "<s>S\n\n### Instruction:\nU\n\n### Response:\n",
}
"""By a template's name: a system message S (gemma has none) and a user's U, up to where the policy speaks."""


@pytest.mark.parametrize("name", SPOKEN)
def test_named_templates(name: str, read: Read, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(
        str(tiny_model), chat_template=at(read({"chat_template": name}).options, "chat_template")
    )
    tokenizer.bos_token = "<s>"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}][name == "gemma" :]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == SPOKEN[name]
    more = [*messages, {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}]
    longer = tokenizer.apply_chat_template(more, tokenize=False, add_generation_prompt=True)
    assert longer.startswith(SPOKEN[name] + "A")  # what a template writes before an answer is what the policy was asked
    assert longer.count("V") == 1


def test_the_system_message_of_qwen(read: Read, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(
        str(tiny_model), chat_template=at(read({"chat_template": "qwen_25"}).options, "chat_template")
    )
    said = tokenizer.apply_chat_template([{"role": "user", "content": "U"}], tokenize=False)
    assert said.startswith(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>"
    )


def test_a_template_of_the_models_own_family_is_the_tokenizers(read: Read) -> None:
    loaded = read({"base_model": "Qwen/Qwen3-0.6B", "chat_template": "qwen3"})
    assert at(loaded.options, "chat_template") == "absent"
    assert "chat_template: qwen3 is what the model's own tokenizer has, which is used" in loaded.notes
    with pytest.raises(ConfigError, match="there is no qwen3 here"):
        read({"base_model": "meta-llama/Llama-3.2-1B", "chat_template": "qwen3"})


@pytest.mark.parametrize(
    ("changes", "saved", "evaluated"),
    [
        ({"save_steps": 0.5, "eval_steps": 0.2}, 50, 20),
        ({"save_steps": 0.125, "eval_steps": 0.001}, 13, 1),
        ({"save_steps": 1.0, "eval_steps": 20}, 1, 20),
        ({"save_steps": 0.5, "eval_steps": 0.2, **trl(num_iterations=2)}, 25, 10),
        ({"save_steps": 0.25, "eval_steps": 0.5, "max_steps": None, "num_epochs": 4}, 20, 40),
        ({"saves_per_epoch": 1, "evals_per_epoch": 2, "max_steps": None, "num_epochs": 4}, 20, 10),
        ({"saves_per_epoch": 0.5, "evals_per_epoch": 3}, 100, 34),
        ({"saves_per_epoch": 4, "evals_per_epoch": 10, **trl(num_iterations=2)}, 13, 5),
    ],
)
def test_steps_below_1_are_a_share_of_all(changes: dict[str, Any], saved: int, evaluated: int, read: Read) -> None:
    options = read({"test_datasets": [{"path": "rows.jsonl"}], **changes}).options
    assert (at(options, "checkpoint/every"), at(options, "evaluate/every")) == (saved, evaluated)


def test_the_adapters_layers_bound_no_full_training(read: Read) -> None:
    assert at(read({"peft_layers_to_transform": [0]}).options, "trains") == {"kind": "full"}


def test_sequence_len_bounds_no_answer(read: Read) -> None:
    """Neither a short one nor one that has room for a prompt; what Axolotl serves with does."""
    for changes in ({"sequence_len": 600}, {"sequence_len": 100}):
        loaded = read(changes)
        assert at(loaded.options, "context") == "absent"
        assert "sequence_len: bounds no prompt and no answer, as in Axolotl: the model's own limit" in str(loaded.notes)
    loaded = read({"sequence_len": 600, "vllm.max_model_len": 700, **trl(**COLOCATE)})
    assert at(loaded.options, "context") == 700
    assert "as in Axolotl: max_model_len does" in str(loaded.notes)
    alone = read({"vllm.max_model_len": 700})
    assert at(alone.options, "context") == "absent"
    assert "vllm.max_model_len: changes nothing: trl.use_vllm is false" in alone.notes


def test_null_is_as_good_as_nothing_for_any_name(read: Read) -> None:
    """Cookbooks leave options empty that no Axolotl knows any more."""
    assert read({"gptq": None, "trl.old": None, "vllm.old": None, "wandb_run_id": None}).options is not None
    with pytest.raises(ConfigError, match="gptq is no option of Axolotl's"):
        read({"gptq": 1})


def test_merge_keys_are_merged(read: Read) -> None:
    """As by ``yaml.safe_load``, so that several sets share their options."""
    read()
    text = Path("a.yaml").read_text().replace("- path: rows.jsonl\n", "- &one\n  path: rows.jsonl\n")
    more = text.replace("learning_rate:", "- {<<: *one, path: few.jsonl}\nlearning_rate:")
    assert text.count("&one") == more.count("*one") == 1
    Path("a.yaml").write_text(more)
    both = [{"path": path, "type": "axolotl_rewards.ask"} for path in ("rows.jsonl", "few.jsonl")]
    assert at(load(Path("a.yaml")).options, "env/cfg/datasets") == both


@pytest.mark.parametrize(
    ("changes", "warmup"),
    [
        ({}, 3),
        ({"max_steps": 4000}, 120),
        ({"warmup_steps": 1}, 2),
        ({"warmup_steps": 0}, "absent"),
        ({"warmup_ratio": 0.0}, "absent"),
        ({"lr_scheduler": "constant"}, "absent"),
        ({"lr_scheduler": "constant", "warmup_steps": 10}, "absent"),
        ({"lr_scheduler": "constant_with_warmup"}, 3),
    ],
)
def test_the_warm_up_is_axolotls(changes: dict[str, Any], warmup: Any, read: Read) -> None:
    """With ``rl: grpo`` it does not know how many steps there are, so the share is rounded up, and has no bound."""
    assert at(read(changes).options, "optimizer/warmup_steps") == warmup


def test_the_least_rate_is_of_a_cosine_alone(read: Read) -> None:
    loaded = read({"lr_scheduler": "linear", "cosine_min_lr_ratio": 0.1})
    assert at(loaded.options, "optimizer/min_lr_ratio") == "absent"
    assert "cosine_min_lr_ratio: changes nothing without lr_scheduler: cosine" in loaded.notes


@pytest.mark.parametrize(
    ("scale", "kind"), [(True, "grpo"), ("group", "grpo"), ("batch", "batch_std"), ("none", "dr_grpo")]
)
def test_ways_to_scale(scale: Any, kind: str, read: Read) -> None:
    assert at(read(trl(scale_rewards=scale)).options, "advantage") == kind


@pytest.mark.parametrize(
    ("named", "reduction"), [("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "constant")]
)
def test_losses(named: str, reduction: str, read: Read) -> None:
    assert at(read(trl(loss_type=named)).options, "loss/reduction") == reduction


def test_losses_without_a_clip(read: Read) -> None:
    """As in TRL, epsilon_high bounds CISPO's weights at every ratio, and SAPO's temperatures are its own."""
    cispo = read(trl(loss_type="cispo", epsilon=0.1, epsilon_high=5.0))
    assert at(cispo.options, "loss") == {"kind": "cispo", "reduction": "token", "cap": 5.0}
    assert "trl.epsilon: changes nothing: cispo does not clip" in cispo.notes
    assert not any("trl.epsilon_high" in note for note in cispo.notes)
    capped = read(trl(loss_type="cispo", num_iterations=2))
    assert at(capped.options, "loss/cap") == 0.2
    assert any(note.startswith("trl.epsilon_high: 0.2 is the largest weight") for note in capped.notes)
    for updates in (1, 2):
        sapo = read(trl(loss_type="sapo", num_iterations=updates, epsilon=0.1))
        assert at(sapo.options, "loss") == {"kind": "sapo", "reduction": "sequence"}
        assert "trl.epsilon: changes nothing: sapo does not clip" in sapo.notes


def test_a_server_is_waited_for_as_long_as_in_trl(read: Read) -> None:
    assert at(read(trl(**SERVER)).options, "engine/start_seconds") == 240.0
    assert at(read(trl(**SERVER), serving=True).options, "engine/start_seconds") == "absent"
    assert at(read(trl(**COLOCATE, vllm_server_timeout=9)).options, "engine/start_seconds") == "absent"


def test_the_server(read: Read) -> None:
    """``tandem serve engine`` starts what a run of the same file looks for."""
    changes = {**trl(**SERVER), "vllm.host": "0.0.0.0", "vllm.port": 8123, "vllm.max_model_len": 99}
    more = {"vllm.tensor_parallel_size": 2, "vllm.data_parallel_size": 2, "vllm.gpu_memory_utilization": 0.85}
    options = read({**changes, **more, "max_steps": None}, serving=True).options
    assert at(options, "engine") == {
        "kind": "vllm",
        "host": "0.0.0.0",
        "port": 8123,
        "gpu_memory_utilization": 0.85,
        "tensor_parallel_size": 2,
        "replicas": 2,
    }
    assert (at(options, "sync/kind"), at(options, "context")) == ("broadcast", 99)
    for odd in ({}, trl(**COLOCATE)):
        with pytest.raises(ConfigError, match="an engine is served alone with use_vllm: true"):
            read(odd, serving=True)


def test_special_tokens(read: Read, tiny_model: Path) -> None:
    own = {"base_model": str(tiny_model), "special_tokens": {"pad_token": "any", "eos_token": "<|im_end|>"}}
    assert read(own).options is not None
    with pytest.raises(ConfigError, match=r"eos_token '</s>' is not the tokenizer's, '<\|im_end\|>'"):
        read({**own, "special_tokens": {"eos_token": "</s>"}})
    with pytest.raises(ConfigError, match="cannot be compared with the tokenizer's"):
        read({"special_tokens": {"eos_token": "</s>"}, "base_model": str(tiny_model / "none")})


def test_rows_that_cannot_be_counted_need_max_steps(read: Read) -> None:
    with pytest.raises(
        ConfigError, match="num_epochs: rows cannot be counted, so give max_steps instead: there is no file"
    ):
        read({"max_steps": None, "datasets": [{"path": "none.jsonl"}]})


def test_show_prints_a_recipe_of_the_same_run(read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(trl(num_iterations=2))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "a.yaml", "steps=3", "loss.clip_high=0.5", "--show"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# ")
    (tmp_path / "b.yaml").write_text(printed)
    again = load(tmp_path / "b.yaml").config
    assert again == load(tmp_path / "a.yaml", ["steps=3", "loss.clip_high=0.5"]).config
    assert (again.steps, again.updates, again.loss.clip_high) == (3, 2, 0.5)  # type: ignore[attr-defined]


def test_the_page_lists_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/axolotl.md").read_text()
    for name in [*TOP, *TRL, *VLLM, *DATASET]:
        assert f"`{name}`" in page, name
