"""TRL's half of ``versus_trl.py``: one GRPOTrainer with vLLM in its own process, a stopwatch around its parts.

    python benchmarks/_versus_trl.py MODEL LINES.jsonl [key=value ...]
    accelerate launch --num_processes 2 benchmarks/_versus_trl.py MODEL LINES.jsonl [key=value ...]

Each step is a line of LINES.jsonl as soon as it is over. Of several processes each has a vLLM of its own and its share
of the step's sequences; the first one's lines are in LINES.jsonl, and another's in a file with its rank in the name.
What is not listed below is TRL's default. Settings:

- weights=bfloat16: type of the weights, of their gradients and of AdamW's states; float32 is TRL's own default
- rows=16: sequences of one forward and backward of a process
- checkpointing=true: recompute activations (TRL's default)
- correction=true: a pass more for the old logprobs, which corrects for vLLM's (TRL's default)
- liger=false: Liger's kernels
- server=0: port of a ``trl vllm-serve`` on this host, instead of an engine in this process
- engine={}: more options of that engine, as JSON without blanks
- vllm=true: false samples by transformers, to try this script where there is no vLLM
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _versus import Parts, Work, add_work, append, drawn, even, multiplied, peak_gb, synchronize, verified, work_of
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

SETTINGS = {
    "weights": "bfloat16",
    "rows": "16",
    "checkpointing": "true",
    "correction": "true",
    "liger": "false",
    "server": "0",
    "engine": "{}",
    "vllm": "true",
}


def settings(assignments: list[str]) -> dict[str, str]:
    """The defaults with what is given laid over them."""
    pairs = dict(text.split("=", 1) for text in assignments)
    if unknown := set(pairs) - set(SETTINGS):
        raise SystemExit(f"TRL's half has no setting {min(unknown)!r}; it has {', '.join(SETTINGS)}")
    return {**SETTINGS, **pairs}


def config(work: Work, chosen: dict[str, str], utilization: float, out: str) -> GRPOConfig:
    """The step's work in TRL's words; generation once a step, on the weights of that step."""
    world, rows = int(os.environ.get("WORLD_SIZE", "1")), int(chosen["rows"])
    sequences, rest = divmod(work.groups * work.siblings, world)
    if rest or sequences % rows:
        raise SystemExit(f"rows must divide the sequences of each of {world} processes in a step, got {rows}")
    forced: dict[str, Any] = {"ignore_eos": True} if chosen["vllm"] == "true" else {"min_new_tokens": work.tokens}
    if work.graded:
        forced = {}
    engine: dict[str, Any] = {"use_vllm": chosen["vllm"] == "true"}
    if engine["use_vllm"]:
        apart: dict[str, Any] = {"vllm_mode": "server", "vllm_server_port": int(chosen["server"])}
        here = {"vllm_mode": "colocate", "vllm_max_model_length": work.context}
        engine |= apart if int(chosen["server"]) else here
        engine |= {
            "vllm_gpu_memory_utilization": utilization,
            "vllm_importance_sampling_correction": chosen["correction"] == "true",
        }
    return GRPOConfig(
        output_dir=out,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        max_steps=work.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=sequences // rows,
        num_generations=work.siblings,
        max_completion_length=work.tokens,
        generation_kwargs=forced,
        gradient_checkpointing=chosen["checkpointing"] == "true",
        use_liger_kernel=chosen["liger"] == "true",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **engine,
    )


class Watched(GRPOTrainer):  # type: ignore[misc,unused-ignore]
    """The trainer, with the times of what it does before forward and backward."""

    parts: Parts
    sampled_at = 0.0

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        output = super()._generate_and_score_completions(*args, **kwargs)
        synchronize()
        self.sampled_at = time.perf_counter()
        inside = self.parts.get("sampling") + self.parts.get("publish")
        self.parts.add("scoring", self.sampled_at - begin - inside)
        return output


class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Ends a lap with every optimizer step."""

    def __init__(self, trainer: Watched, lines: Path):
        self._trainer, self._lines, self._stepped_at, self._seen = trainer, lines, 0.0, 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        append(self._lines, kind="about", parameters=multiplied(self._trainer.model), loaded_gb=peak_gb(reset=True))
        self._trainer.parts.lap()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self._stepped_at = time.perf_counter()
        self._trainer.parts.add("forward+backward", self._stepped_at - self._trainer.sampled_at)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self._trainer.parts.add("optimizer", time.perf_counter() - self._stepped_at)

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        self._trainer.parts.note(tokens=state.num_input_tokens_seen - self._seen)
        self._trainer.parts.lap()
        self._seen = state.num_input_tokens_seen


def watch_engine(trainer: Watched) -> None:
    """Count vLLM's sampling and the copying of weights into it apart."""
    engine, parts = trainer.vllm_generation, trainer.parts
    sync, generate = engine.sync_weights, engine.generate

    def timed_sync(*args: Any, **kwargs: Any) -> Any:
        with parts.timed("publish"):
            return sync(*args, **kwargs)

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        with parts.timed("sampling"):
            return generate(*args, **kwargs)

    engine.sync_weights, engine.generate = timed_sync, timed_generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("lines", type=Path, help="JSON lines of the steps")
    parser.add_argument("--utilization", type=float, default=0.3, help="vLLM's gpu_memory_utilization")
    parser.add_argument("settings", nargs="*", help="key=value, see above")
    add_work(parser)
    args = parser.parse_intermixed_args()
    work, chosen = work_of(args), settings(args.settings)
    if rank := int(os.environ.get("RANK", "0")):
        args.lines = args.lines.with_suffix(f".{rank}.jsonl")
    disable_progress_bar()
    disable_progress_bars()
    append(args.lines, kind="about", overrides=[f"{k}={v}" for k, v in chosen.items()])
    texts = work.questions() if work.graded else [{"prompt": text} for text in work.prompts()]
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in texts]
    if chosen["vllm"] == "true":
        vllm_generation.LLM = partial(vllm_generation.LLM, **json.loads(chosen["engine"]))
    with tempfile.TemporaryDirectory(prefix="versus-trl-") as out:
        trainer = Watched(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, chosen["weights"])),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs={"verified": verified, "drawn": drawn}[work.reward] if work.graded else even,
            args=config(work, chosen, args.utilization, out),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.parts = Parts(args.lines)
        trainer.add_callback(Clock(trainer, args.lines))
        trainer.remove_callback(PrinterCallback)
        if chosen["vllm"] == "true":
            watch_engine(trainer)
        trainer.train()


if __name__ == "__main__":
    main()
