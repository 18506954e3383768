"""TRL's half of the results: the tasks and rewards of a recipe of Tandem's, trained by TRL's GRPOTrainer.

    python benchmarks/_results_trl.py RECIPE FOLDER [key=value ...] [--utilization 0.1] [--no-vllm]

Questions, rewards, groups, answers' lengths, learning rate and steps are the recipe's; vLLM is colocated; what else
there is is TRL's default, float32 weights under bfloat16 autocast among it. FOLDER gets ``metrics.jsonl``,
``eval.jsonl`` and ``events.jsonl`` as a run of Tandem's has them, so that both are summed up by the same code. Held-out
questions are answered by the same engine, at the recipe's ``evaluate``. TRL trains on groups whose answers all earn
the same too, where Tandem's recipe samples others; tokens are those sampled, of either.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _versus import append
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from tandem.config import loading as recipes
from tandem.config.loading import RunConfig
from tandem.rollout.measure import interval
from tandem.types import Message, Rollout, Task


class Scored:
    """The recipe's rewards, as a reward function of TRL's and for held-out answers."""

    __name__ = "tandem"

    def __init__(self, config: RunConfig, tasks: Sequence[Task]):
        (source,) = config.sources.values()
        self._specs = list(source.rewards.values())
        self._tasks = tasks
        self.answers: list[float] = []
        """Accuracy of the last batch's answers."""

    def parts(self, task: Task, text: str) -> list[float]:
        """What each reward gives, unweighted; 0 where it says nothing."""
        messages = (*task.prompt, Message(role="assistant", content=text))
        rollout = Rollout(id="", task=task, turns=(), messages=messages, status="ok")
        return [float(spec.reward(rollout) or 0.0) for spec in self._specs]

    def __call__(self, completions: Sequence[Any], index: Sequence[int], **_: Any) -> list[float]:
        """TRL's signature; ``index`` is a column of the data set."""
        every = [self.parts(self._tasks[i], c[0]["content"]) for i, c in zip(index, completions, strict=True)]
        self.answers = [float(parts[0] >= 1.0) for parts in every]
        return [sum(p * spec.weight for p, spec in zip(parts, self._specs, strict=True)) for parts in every]

    def right(self, task: Task, text: str) -> bool:
        """Whether the first reward gives full marks."""
        return self.parts(task, text)[0] >= 1.0


class Held:
    """Held-out tasks, answered by the trainer's engine, or by its model where there is none."""

    def __init__(self, config: RunConfig, folder: Path, tokenizer: Any, scored: Scored):
        (source,) = config.sources.values()
        self._config, self._folder, self._tokenizer, self._scored = config, folder, tokenizer, scored
        self._tasks = list(source.env.tasks("test"))[: config.evaluate.tasks]

    def __call__(self, trainer: GRPOTrainer, step: int) -> None:
        """Answer them and write down how many were right."""
        begun, samples = time.time(), self._config.evaluate.samples
        texts = self._answers(trainer, step)
        right = [sum(self._scored.right(task, t) for t in each) for task, each in zip(self._tasks, texts, strict=True)]
        means = [n / samples for n in right]
        about = {
            "tasks": len(means),
            "samples": samples,
            "mean": sum(means) / len(means),
            "seconds": time.time() - begun,
        }
        append(self._folder / "eval.jsonl", step=step, time=time.time(), mean_ci=list(interval(means)), **about)

    def _answers(self, trainer: GRPOTrainer, step: int) -> list[list[str]]:
        chats = [[{"role": m.role, "content": m.content} for m in task.prompt] for task in self._tasks]
        prompts = [
            self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats
        ]
        sampling, samples = self._config.sampling, self._config.evaluate.samples
        if getattr(trainer, "vllm_generation", None) is not None:
            from vllm import SamplingParams

            if step:
                trainer.vllm_generation.sync_weights()
            limits = SamplingParams(
                n=samples, temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=self._config.seed
            )
            ids = [{"prompt_token_ids": self._tokenizer(p, add_special_tokens=False)["input_ids"]} for p in prompts]
            request_outputs = trainer.vllm_generation.llm.generate(ids, limits, use_tqdm=False)
            return [[one.text for one in request.outputs] for request in request_outputs]
        batch = self._tokenizer(
            prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(trainer.model.device)
        with torch.no_grad():
            out = trainer.model.generate(
                **batch, do_sample=True, max_new_tokens=sampling.max_tokens, num_return_sequences=samples
            )
        texts = self._tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return [texts[i : i + samples] for i in range(0, len(texts), samples)]


class MetricsCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Writes each step down, and evaluates when the recipe says so."""

    def __init__(self, config: RunConfig, folder: Path, held: Held, scored: Scored):
        self._config, self._folder, self._held, self._scored = config, folder, held, scored
        self.trainer: GRPOTrainer
        self._began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._held(self.trainer, 0)
        self._began = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "reward" not in logs:
            return
        now, answers = time.time(), self._config.groups_per_step * self._config.group_size
        length = logs["completions/mean_length"]
        metrics = {"reward": logs["reward"], "length": length, "tokens/generated": length * answers}
        metrics |= {"accuracy": sum(self._scored.answers) / max(1, len(self._scored.answers))}
        metrics |= {"seconds/step": now - self._began, "grad_norm": logs.get("grad_norm")}
        if torch.cuda.is_available():
            metrics["memory/gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
        append(self._folder / "metrics.jsonl", step=state.global_step, time=now, metrics=metrics)
        every = self._config.evaluate.every
        if state.global_step == state.max_steps or (every and state.global_step % every == 0):
            self._held(self.trainer, state.global_step)
        self._began = time.time()


def settings(config: RunConfig, out: str, utilization: float, vllm: bool) -> GRPOConfig:
    """The recipe in TRL's words."""
    sequences = config.groups_per_step * config.group_size
    engine: dict[str, Any] = {"use_vllm": vllm}
    if vllm:
        engine |= {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": utilization,
            "vllm_max_model_length": config.context,
        }
    return GRPOConfig(
        output_dir=out,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        max_steps=config.steps,
        per_device_train_batch_size=sequences,
        num_generations=config.group_size,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        learning_rate=getattr(config.optimizer, "lr", 1e-5),
        lr_scheduler_type="constant",
        seed=config.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **engine,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--utilization", type=float, default=0.1, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the recipe")
    args = parser.parse_intermixed_args()
    disable_progress_bar()
    disable_progress_bars()
    config = recipes.load(args.recipe, args.overrides).config
    args.folder.mkdir(parents=True, exist_ok=True)
    append(args.folder / "events.jsonl", event="run_started", time=time.time())
    (source,) = config.sources.values()
    tasks = list(source.env.tasks("train"))
    rows = [
        {"prompt": [{"role": m.role, "content": m.content} for m in task.prompt], "index": i}
        for i, task in enumerate(tasks)
    ]
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    scored = Scored(config, tasks)
    callback = MetricsCallback(config, args.folder, Held(config, args.folder, tokenizer, scored), scored)
    with tempfile.TemporaryDirectory(prefix="results-trl-") as out:
        callback.trainer = trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=scored,
            args=settings(config, out, args.utilization, args.vllm),
            train_dataset=Dataset.from_list(rows),
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    append(args.folder / "events.jsonl", event="run_done", time=time.time())


if __name__ == "__main__":
    main()
