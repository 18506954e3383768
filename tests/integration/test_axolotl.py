"""An Axolotl project, unchanged: a reward module, a prompt transform and a file that names them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import (
    DTYPE,
    HEAD_DIM,
    engine,
    groups_once,
    metrics,
    needs_engine,
    published,
    same_logprobs,
)

from tandem.model.policy import load_tokenizer
from tandem.ports import free_port

REWARDS = '''
import re
import signal
import threading

def accuracy_reward(completions, answer, **kwargs):
    """How near the last number is. Uses an alarm, as math_verify does: it works in the main thread alone."""
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    rewards = []
    for completion, correct in zip(completions, answer):
        numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", completion[0]["content"])
        rewards.append(max(0.0, 1.0 - abs(float(numbers[-1]) - float(correct)) / 9) if numbers else 0.0)
    signal.alarm(0)
    return rewards

def format_reward(completions, prompts, kind, **kwargs):
    """Answers in digits; None where the row says that its form does not matter."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert "question" not in kwargs
    rewards = []
    for completion, one in zip(completions, kind):
        text = completion[0]["content"]
        rewards.append(None if one == "free" else sum(c in "0123456789" for c in text) / max(1, len(text)))
    return rewards

def prompt_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        return {
            "prompt": [
                {"role": "system", "content": f"At most {cfg.trl.max_completion_length} tokens."},
                {"role": "user", "content": example["question"]},
            ],
            "answer": example["answer"].split("####")[-1].strip(),
        }
    return transform_fn, {"remove_columns": ["question"]}
'''


def project(folder: Path, model: Path, port: int = 8000, **trl: Any) -> Path:
    """Write the project and return its folder: the options of Axolotl's quick start, with a test's model and data."""
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"question": f"{n % 4}+1? {n}", "answer": f"#### {n % 4 + 1}", "kind": "strict"} for n in range(24)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "base_model": str(model),
        "rl": "grpo",
        "chat_template": "tokenizer_default",
        "vllm": {
            "host": "0.0.0.0",
            "port": port,
            "gpu_memory_utilization": 0.85,
            "dtype": "auto",
            "max_model_len": 256,
        },
        "adapter": "lora",
        "lora_r": 16,
        "lora_alpha": 64,
        "lora_target_linear": True,
        "trl": {
            "use_vllm": True,
            "use_data_producer": True,
            "vllm_server_host": "0.0.0.0",
            "vllm_server_port": port,
            "vllm_server_timeout": 240,
            "vllm_lora_sync": True,
            "num_generations": 16,
            "max_completion_length": 2,
            "temperature": 0.9,
            "reward_funcs": ["rewards.accuracy_reward", "rewards.format_reward"],
            "reward_weights": [1.0, 0.5],
            **trl,
        },
        "datasets": [
            {
                "path": str(folder / "train.jsonl"),
                "name": "main",
                "type": "rewards.prompt_transform",
                "split": "train",
            }
        ],
        "skip_prepare_dataset": True,
        "val_set_size": 0.0,
        "sequence_len": 128,
        "micro_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "max_steps": 16,
        "learning_rate": 5.0e-3,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "warmup_steps": 1,
        "bf16": DTYPE == "bfloat16",
        "attn_implementation": "flash_attention_2",
        "gradient_checkpointing": True,
        "special_tokens": {"pad_token": "<|endoftext|>"},
        "output_dir": "./grpo-output",
        "logging_steps": 1,
        "wandb_name": "run",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    return folder


def tandem(folder: Path, *words: str) -> str:
    """Run a command in a process of its own, in a folder; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *words], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_an_unchanged_project_trains(tiny_model: Path, tmp_path: Path) -> None:
    """Its rewards are called as Axolotl calls them, they are weighted, and weights move; it needs no engine apart."""
    folder = project(tmp_path / "project", tiny_model, use_vllm=False, vllm_lora_sync=False)
    output = tandem(folder, "train", "config.yaml", "threads=1", "steps=2")
    assert "done: " in output
    run = folder / "grpo-output" / "run"
    assert output.startswith(f"run · {tiny_model.name} · {folder / 'train.jsonl'} · lora")
    steps = metrics(run).values()
    assert len(steps) == 2
    assert all(step["grad_norm"] > 0 for step in steps)
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    assert recipe["trainable"]["kind"] == "lora"
    assert recipe["env"]["cfg"]["trl"]["reward_weights"] == [1.0, 0.5]
    # From another folder, where there is no rewards.py.
    assert "mean@" in tandem(tmp_path, "eval", str(run), "evaluate.tasks=2", "env.cfg.val_set_size=0.3")


TEXTS = """
def digits(completions, prompts, **kwargs):
    assert all(isinstance(text, str) for text in [*prompts, *completions])
    assert set(prompts) <= {f"{n % 4}+1? {n}" for n in range(24)}
    return [sum(c in "0123456789" for c in text) / max(1, len(text)) for text in completions]

def ask(cfg, *args, **kwargs):
    return lambda row: {"prompt": row["question"]}, {"remove_columns": ["question"]}
"""


@pytest.mark.long
def test_texts_are_gone_on_with_by_several_steps_of_one_policy(tiny_model: Path, tmp_path: Path) -> None:
    """As in TRL no chat template is put around them, rewards get texts, and ratios to the sampler are clipped."""
    one = {"use_vllm": False, "vllm_lora_sync": False, "reward_funcs": ["texts.digits"], "reward_weights": [1.0]}
    folder = project(tmp_path / "project", tiny_model, **one, generation_batch_size=192, epsilon=0.01)
    (folder / "texts.py").write_text(TEXTS)
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("rewards.prompt_transform", "texts.ask"))
    tandem(folder, "train", "config.yaml", "threads=1", "steps=4")
    run = folder / "grpo-output" / "run"
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    assert (recipe["old_logprobs"], recipe["max_lag"], recipe["loss"]["clip_high"]) == ("sampled", 2, 0.01)
    tokenizer = load_tokenizer(str(tiny_model))
    for line in (run / "rollouts" / "000001.jsonl").read_text().splitlines():
        row = json.loads(line)
        (text,) = row["prompt"]
        assert (text["role"], row["prompts"][0]) == ("text", [0, tokenizer.encode(text["content"])])
    clipped = [step["clip_fraction"] for step in metrics(run).values()]
    assert len(clipped) == 4
    assert max(clipped) > 0


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """``tandem serve engine`` of the project's file, with what an engine on this machine needs besides."""
    here = [f"engine.{name}={json.dumps(value)}" for name, value in engine().items() if name != "kind"]
    command = [sys.executable, "-m", "tandem", "serve", "engine", "config.yaml", *here]
    with (folder / "served.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, (folder / "served.txt").read_text()


@needs_engine
@pytest.mark.long
def test_the_quick_start_learns(tmp_path: Path) -> None:
    """Its two commands: serve the engine, train. Adapters are swapped in at every step, and the rewards rise."""
    model = build_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    folder = project(tmp_path / "project", model, free_port(), async_prefetch=True)
    with served(folder):
        assert "done: " in tandem(folder, "train", "config.yaml", "threads=1")
    run = folder / "grpo-output" / "run"
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    assert (recipe["sync"]["kind"], recipe["max_lag"], recipe["engine"]["kind"]) == ("hotswap", 1, "vllm")
    steps = list(metrics(run).values())
    assert len(steps) == 16
    assert all(step["correction/weight"] > 0 and step["grad_norm"] > 0 for step in steps)
    # By chance about 0.05 and 0.05; a policy that has found the digits gets some 0.6 and 0.6.
    for name in ("accuracy_reward", "format_reward"):
        first, last = (sum(step[f"reward/rewards.{name}"] for step in part) / 3 for part in (steps[:3], steps[-3:]))
        assert last > first + 0.15, name
    assert sorted(published(run)) == list(range(1, 17))
    groups_once(run, each=4)
    same_logprobs(run)
