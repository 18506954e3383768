"""Scripts of TRL's GRPOTrainer run by another import; what has no counterpart is named at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tandem.errors import ConfigError
from tandem.model.policy import load_tokenizer
from tandem.trl import GRPOConfig, GRPOTrainer, accuracy_reward, think_format_reward

TRACKIO = [
    {"kind": "console", "live": "auto"},
    {"kind": "trackio", "project": "p", "space": None, "group": None},
]
ROWS = [{"prompt": f"What is {n} + 1? ", "answer": str(n + 1)} for n in range(20)]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


def letters(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def right(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(gold in reply[0]["content"]) for reply, gold in zip(completions, answer, strict=True)]


class Saves(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def options(data: Any = ROWS, reward: Any = letters, more: Any = None, **fields: Any) -> dict[str, Any]:
    trainer = GRPOTrainer("m", reward, GRPOConfig(**fields), train_dataset=data, **(more or {}))
    return trainer.recipe.options


def test_defaults_are_trls() -> None:
    recipe = options()
    assert (recipe["groups_per_step"], recipe["group_size"], recipe["steps"]) == (1, 8, 60)  # 3 epochs of 20 rows
    assert (recipe["advantage"]["kind"], recipe["loss"]["reduction"], recipe["old_logprobs"]) == (
        "grpo", "token", "recomputed",
    )  # fmt: skip
    assert (recipe["optimizer"]["lr"], recipe["optimizer"]["schedule"], recipe["seed"]) == (1e-6, "linear", 42)
    assert (recipe["sampling"]["max_tokens"], recipe["zero_variance_groups"]) == (512, "keep")
    assert (recipe["evaluate"]["tasks"], recipe["checkpointing"], recipe["reference"]) == (0, "full", None)


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"learning_rate": 1e-5}, "optimizer.lr", 1e-5),
        ({"num_generations": 4}, "group_size", 4),
        ({"gradient_accumulation_steps": 4}, "groups_per_step", 4),
        ({"max_steps": 7}, "steps", 7),
        ({"model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}}, "dtype", "float32"),
        ({"report_to": "trackio", "project": "p"}, "loggers", TRACKIO),
        ({"warmup_ratio": 0.1}, "optimizer.warmup_steps", 6),
        ({"beta": 0.04}, "reference.beta", 0.04),
        ({"loss_type": "dr_grpo"}, "loss.reduction", "constant"),
        ({"scale_rewards": "batch"}, "advantage.kind", "batch_std"),
        ({"num_iterations": 2, "epsilon_high": 0.28}, "loss.clip_high", 0.28),
        ({"steps_per_generation": 4}, "max_lag", 3),
        ({"report_to": ["wandb"]}, "metric_names", "trl"),
        ({"use_vllm": True}, "sync.kind", "shared"),
        ({"use_vllm": True, "vllm_mode": "server"}, "engine.urls", ["http://127.0.0.1:8000"]),
        ({"use_vllm": True}, "corrections", [{"kind": "sequence", "beyond": "mask", "low": None, "high": 3.0}]),
        ({"generation_kwargs": {"max_tokens": 9}}, "sampling.max_tokens", 9),
    ],
)
def test_a_field_is_an_option(fields: dict[str, Any], path: str, value: Any) -> None:
    option: Any = options(**fields)
    for name in path.split("."):
        option = option[name]
    assert option == value


@pytest.mark.parametrize(("data", "chat"), [(ROWS, False), (CHATS, True)])
def test_a_text_is_gone_on_with_and_messages_are_a_chat(data: Any, chat: bool) -> None:
    assert options(data)["env"]["chat"] is chat


def test_rewards_are_functions_and_models_with_weights() -> None:
    rewards = options(CHATS, [right, "org/model"], reward_weights=[1.0, 0.5])["rewards"]
    assert [(name, entry["weight"]) for name, entry in rewards.items()] == [("right", 1.0), ("reward_model", 0.5)]
    assert rewards["reward_model"]["model"] == "org/model"


@pytest.mark.parametrize(
    ("solution", "answer", "reward"),
    [(r"$\frac{1}{2}$", r"It is $\frac{2}{4}$.", 1.0), ("$3$", "It is $4$.", 0.0), ("", "It is $4$.", None)],
)
def test_trls_rewards_are_there(solution: str, answer: str, reward: float | None) -> None:
    assert accuracy_reward([answer, [{"role": "assistant", "content": answer}]], [solution] * 2) == [reward] * 2
    assert options(CHATS, accuracy_reward)["rewards"]["accuracy_reward"]["kind"].endswith("rewards:accuracy_reward")
    assert think_format_reward(["<think>a</think>b", "b"]) == [1.0, 0.0]


def test_held_out_rows_are_evaluated_when_they_are_asked_for() -> None:
    evaluated = options(more={"eval_dataset": ROWS[:5]}, eval_strategy="steps", eval_steps=10)["evaluate"]
    assert (evaluated["tasks"], evaluated["every"]) == (5, 10)
    assert options(more={"eval_dataset": ROWS[:5]})["evaluate"]["tasks"] == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"learing_rate": 1e-5}, "learing_rate: it is no field .* did you mean 'learning_rate'"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile: it cannot be 0.2 here"),
        ({"model_init_kwargs": {"revision": "old"}}, "model_init_kwargs: revision: it has no counterpart"),
        ({"num_generations": 3}, "no whole number of groups of 3"),
        ({"fsdp": "full_shard"}, "fsdp: it cannot be 'full_shard' here: ranks and shards are options of the recipe"),
    ],
)
def test_a_field_that_cannot_be_had_is_told_as_the_configuration_is_made(fields: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GRPOConfig(**fields)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"callbacks": [Saves]}, r"callbacks: Saves.on_save: only on_init_end, .* are called"),
        ({"tools": [len], "trian": 1}, "2 problems:\n  tools: it has no .*environment.*\n  trian: .* no such argument"),
        ({"peft_config": object()}, "peft_config: Tandem trains PEFT's plain LoRA"),
    ],
)
def test_an_argument_without_a_counterpart_is_named(arguments: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        options(more=arguments)


def test_a_tokenizer_brings_a_chat_template_of_its_own(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{{ messages[-1].content }}"
    recipe = GRPOTrainer(str(tiny_model), letters, train_dataset=CHATS, processing_class=tokenizer).recipe
    assert recipe.options["chat_template"] == tokenizer.chat_template


@pytest.mark.slow
def test_trls_quick_start_trains_and_saves(tiny_model: Path) -> None:
    def unique(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(set(completion))) for completion in completions]

    def silent(completions: list[Any], **kwargs: Any) -> list[None]:
        return [None] * len(completions)

    args = GRPOConfig(output_dir="out", max_steps=2, num_generations=4, per_device_train_batch_size=4,
                      max_completion_length=4, bf16=False)  # fmt: skip
    trainer = GRPOTrainer(model=str(tiny_model), reward_funcs=[unique, silent], args=args, train_dataset=ROWS)
    assert trainer.train().global_step == 2
    run = trainer.run
    assert run is not None
    assert run.status == "finished"
    assert run.folder.parent.name == "out"
    assert all(row["reward"] == len(set(row["text"])) for row in run.rollouts())
    trainer.save_model("saved")
    assert Path("saved/config.json").is_file()
