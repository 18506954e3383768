"""TRL's GRPOTrainer on the CPU: full fine-tuning on problems whose reward is that the last number is right.

    bash benchmarks/peers/setup
    .venv/bin/python benchmarks/peers/workload.py .cache/chain_sum.jsonl
    .venv-peers/bin/python benchmarks/peers/trl_grpo.py MODEL .cache/chain_sum.jsonl --steps 3

Prints JSON: ``seconds_per_step`` (the first one warms up), ``peak_rss_gb``, ``reward`` (mean of each step) and
``tokens`` (mean completion length of each step). Problems are drawn in the file's order, again from the start when
it ends. Options that are not listed are TRL's defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import workload
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Seconds from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [workload.last_number_reward(text, gold) for text, gold in zip(texts, answer, strict=True)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("prompts", type=Path, help="JSONL with prompt and answer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4, help="prompts of one step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--weights", choices=("float32", "bfloat16"), default="float32", help="both under bfloat16 autocast"
    )
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=None)
    return parser.parse_args()


def config(args: argparse.Namespace, out: str) -> GRPOConfig:
    chosen = {} if args.gradient_checkpointing is None else {"gradient_checkpointing": args.gradient_checkpointing}
    return GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=True,
        max_steps=args.steps,
        per_device_train_batch_size=args.groups * args.group_size,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        temperature=args.temperature,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        seed=args.seed,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **chosen,
    )


def main() -> None:
    args = arguments()
    disable_progress_bar()
    disable_progress_bars()
    needed = args.steps * args.groups
    rows = workload.read(args.prompts)
    rows = (rows * (needed // len(rows) + 1))[:needed]
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.weights)),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=reward,
            args=config(args, out),
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    result = {
        "seconds_per_step": [round(s, 3) for s in clock.seconds],
        "peak_rss_gb": round(workload.peak_rss_gb(), 3),
        "reward": [entry["reward"] for entry in logs],
        "tokens": [entry["completions/mean_length"] for entry in logs],
        "threads": torch.get_num_threads(),
        "weights": args.weights,
        "gradient_checkpointing": trainer.args.gradient_checkpointing,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
