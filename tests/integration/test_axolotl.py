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
from integration.atropos_peers import free_port
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

REWARDS = '''
import signal
import threading

def accuracy_reward(completions, answer, **kwargs):
    """Uses an alarm, as math_verify does: it works in the main thread alone."""
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    try:
        return [float(gold in completion[0]["content"]) for completion, gold in zip(completions, answer)]
    finally:
        signal.alarm(0)

def format_reward(completions, prompts, kind, **kwargs):
    """Answers in plain letters; None where the row says that its form does not matter."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert "question" not in kwargs
    found = []
    for completion, one in zip(completions, kind):
        text = completion[0]["content"]
        plain = sum(c.isascii() and c.isprintable() for c in text)
        found.append(None if one == "free" else plain / max(1, len(text)))
    return found

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


def project(folder: Path, model: Path, **trl: Any) -> Path:
    """Write the project; returns its file. It has the shape of Axolotl's quick start."""
    folder.mkdir()
    (folder / "axolotl_project_rewards.py").write_text(REWARDS)
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}", "kind": "strict"} for n in range(24)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "base_model": str(model),
                "rl": "grpo",
                "chat_template": "tokenizer_default",
                "vllm": {"host": "0.0.0.0", "port": trl.get("vllm_server_port", 8000), "max_model_len": 256},
                "adapter": "lora",
                "lora_r": 8,
                "lora_alpha": 16,
                "lora_dropout": 0.05,
                "lora_target_linear": True,
                "trl": {
                    "num_generations": 4,
                    "max_completion_length": 12,
                    "temperature": 0.9,
                    "reward_funcs": [f"axolotl_project_rewards.{name}_reward" for name in ("accuracy", "format")],
                    "reward_weights": [1.0, 0.5],
                    **trl,
                },
                "datasets": [{"path": str(folder / "train.jsonl"), "type": "axolotl_project_rewards.prompt_transform"}],
                "skip_prepare_dataset": True,
                "val_set_size": 0.0,
                "sequence_len": 256,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 4,
                "max_steps": 3,
                "learning_rate": 1.0e-3,
                "optimizer": "adamw_torch_fused",
                "lr_scheduler": "cosine",
                "warmup_steps": 1,
                "bf16": DTYPE == "bfloat16",
                "attn_implementation": "flash_attention_2",
                "gradient_checkpointing": True,
                "special_tokens": {"pad_token": "<|endoftext|>"},
                "output_dir": str(folder / "out"),
                "logging_steps": 1,
                "wandb_name": "run",
            },
            sort_keys=False,
        )
    )
    return folder / "config.yaml"


def tandem(folder: Path, *words: str) -> str:
    """Run a command in a process of its own, in the project's folder; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *words], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_unchanged_project_trains(tiny_model: Path, tmp_path: Path) -> None:
    """Its rewards are called as Axolotl calls them, they are weighted, and weights move."""
    project(tmp_path / "project", tiny_model)
    folder = tmp_path / "project"
    tandem(folder, "check", "config.yaml")
    assert "done: " in tandem(folder, "train", "config.yaml", "threads=1")
    run = folder / "out" / "run"
    steps = metrics(run).values()
    assert len(steps) == 3
    assert all(step["reward/axolotl_project_rewards.format_reward"] > 0 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert (run / "checkpoints").is_dir()
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    assert recipe["trains"]["kind"] == "lora"
    assert recipe["env"]["cfg"]["trl"]["reward_weights"] == [1.0, 0.5]
    assert "mean@" in tandem(folder, "eval", str(run), "evaluate.tasks=2", "env.cfg.val_set_size=0.3")


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """``tandem serve engine`` of the project's file, with what an engine on this machine needs besides."""
    here = [f"engine.{name}={json.dumps(value)}" for name, value in engine().items() if name != "kind"]
    command = [sys.executable, "-m", "tandem", "serve", "engine", "config.yaml", *here]
    with (folder / "served.txt").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, (folder / "served.txt").read_text()


@needs_engine
@pytest.mark.slow
def test_an_unchanged_project_trains_with_its_server(tmp_path: Path) -> None:
    """The two commands of Axolotl's quick start: serve the engine, train; adapters are swapped in it at every step."""
    model = build_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    server = {"use_vllm": True, "vllm_server_host": "0.0.0.0", "vllm_server_port": free_port()}
    more = {"vllm_server_timeout": 240, "vllm_lora_sync": True, "use_data_producer": True, "async_prefetch": True}
    project(tmp_path / "project", model, **server, **more)
    folder = tmp_path / "project"
    with served(folder):
        assert "done: " in tandem(folder, "train", "config.yaml", "threads=1")
    run = folder / "out" / "run"
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    assert (recipe["sync"]["kind"], recipe["max_lag"], recipe["engine"]["kind"]) == ("hotswap", 1, "vllm")
    assert all(step["correction/weight"] > 0 and step["grad_norm"] > 0 for step in metrics(run).values())
    assert sorted(published(run)) == [1, 2, 3]
    groups_once(run, each=2)
    same_logprobs(run)
