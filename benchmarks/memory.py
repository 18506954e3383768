"""What the memory plan says beside what a training step takes, each case in a process of its own.

    python benchmarks/memory.py [CASE ...] [--json FILE]

Weights are random and made where they are used, so nothing is downloaded. A step of two micro-batches of the longest
answers runs, twice; the peak of its passes and its updates is told, and the moments before it.

- On a CPU: resident memory (VmHWM, reset by /proc/self/clear_refs) above what the process held when a small model had
  trained once. glibc's allocator as it is; with MALLOC_MMAP_THRESHOLD_=65536 in the environment the plan's slack is 0.
- On CUDA: what torch's allocator handed out at its peak, what it reserved, and what the driver says is taken.

Without names the cases of the machine at hand run: three small ones, or qwen2.5-3b, 7b and 14b.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _models import SHAPES
from _step_batches import Shape, groups

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig
from tandem.envs.arithmetic import Arithmetic
from tandem.machine import accelerator, host
from tandem.model import layers
from tandem.model.attention import NAME
from tandem.model.policy import Compute, Policy
from tandem.trainer import memory_plan as memory
from tandem.trainer.pack import Packer
from tandem.trainer.step import LocalWork, Step
from tandem.types import Sampling

OWN: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "deep": {
        "hidden_size": 256,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 704,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    },
}
"""SmolLM2's published configuration, and one of many layers and few tokens."""
LORA = ("lora", {"rank": 32})
CASES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"shape": "smollm2-135m", "siblings": 4, "prompt": 64, "answer": 100},
    "qwen2.5-0.5b lora": {"shape": "qwen2.5-0.5b", "siblings": 4, "prompt": 64, "answer": 100, "trainable": LORA},
    "deep": {"shape": "deep", "siblings": 4, "prompt": 120, "answer": 200, "dtype": "float32"},
    "deep selective": {"shape": "deep", "siblings": 4, "prompt": 120, "answer": 200, "dtype": "float32",
                       "checkpointing": "selective"},
    "deep recomputed": {"shape": "deep", "siblings": 4, "prompt": 120, "answer": 200, "dtype": "float32",
                        "checkpointing": "full"},
}  # fmt: skip
ON_CUDA: dict[str, dict[str, Any]] = {
    "3b": {"shape": "qwen2.5-3b", "siblings": 16, "prompt": 256, "answer": 256},
    "3b selective": {"shape": "qwen2.5-3b", "siblings": 32, "prompt": 256, "answer": 256,
                     "checkpointing": "selective"},
    "7b recomputed 8bit": {"shape": "qwen2.5-7b", "siblings": 32, "prompt": 256, "answer": 256,
                           "checkpointing": "full", "optimizer": ("adamw8bit", {})},
    "14b lora": {"shape": "qwen2.5-14b", "siblings": 16, "prompt": 256, "answer": 256, "trainable": LORA},
}  # fmt: skip
SMALL = {"shape": "tiny", "siblings": 2, "prompt": 24, "answer": 24}


def recipe(case: Mapping[str, Any]) -> RunConfig:
    """The case as a run whose micro-batches hold a group each."""
    parts: dict[str, tuple[str, dict[str, Any]]] = {"trainable": ("full", {}), "optimizer": ("adamw", {})}
    categories = {"trainable": "trainable", "optimizer": "optimizers"}
    chosen = {name: case.get(name, default) for name, default in parts.items()}
    built = {name: resolve.find(categories[name], kind)(**options) for name, (kind, options) in chosen.items()}
    plain = {name: case[name] for name in ("dtype", "checkpointing", "compile") if name in case}
    return RunConfig(
        model=case["shape"],
        steps=2,
        env=Arithmetic(),
        group_size=case["siblings"],
        groups_per_step=2,
        micro_batch_tokens=case["prompt"] + case["siblings"] * (case["answer"] - 1),
        sampling=Sampling(max_tokens=case["answer"]),
        **built,
        **plain,
    )


def model_config(shape: str) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**(OWN | SHAPES)[shape], max_position_embeddings=32768)


async def trained(case: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Two steps; ``note`` is called when something has been reached."""
    config = recipe(case)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def load() -> Any:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, config.dtype)
        with device:
            model = AutoModelForCausalLM.from_config(model_config(case["shape"]), attn_implementation=NAME, dtype=dtype)
            model = config.trainable.prepare(model).eval()
        layers.tune(model, compile=config.compile, checkpointing=config.checkpointing)
        return model

    compute = Compute(int(os.environ.get("OMP_NUM_THREADS", "0")))
    policy = Policy(await compute(load), None, name="benchmark", compute=compute)
    note("weights")
    stepper = await compute(config.optimizer.bind, config.trainable.parameters(policy.model))
    note("states")
    work = LocalWork.of(config, policy, stepper, None)
    step = Step.of(config, work)
    shape = Shape("benchmark", config.groups_per_step, config.group_size, case["prompt"], case["answer"])
    batch = Packer.of(config, policy)(groups(shape, vocabulary=200, seed=0), version=0)
    assert len(batch.micro) == 2, [len(micro.tokens_T) for micro in batch.micro]
    for number in (1, 2):
        stats = await step.forward_backward(batch)
        note(f"pass {number}")
        await step.apply(number, batch, stats)
        note(f"update {number}")
    policy.close()


class Resident:
    """A process's memory on the host, above what it held before."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.rows: dict[str, dict[str, int]] = {}
        self._base = self._read("VmRSS")
        self._reset()

    def note(self, what: str) -> None:
        """What is held, and the most since the last note."""
        self.rows[what] = {"held": self._read("VmRSS") - self._base, "peak": self._read("VmHWM") - self._base}
        self._reset()

    @staticmethod
    def _read(name: str) -> int:
        rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(rows[name].split()[0]) * 1024

    @staticmethod
    def _reset() -> None:
        Path("/proc/self/clear_refs").write_text("5")


class Card:
    """A process's memory on a CUDA device."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, int]] = {}
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def note(self, what: str) -> None:
        """What is held, and the most since the last note."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.rows[what] = {
            "held": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "taken": total - free,
        }
        torch.cuda.reset_peak_memory_stats()


def child(name: str) -> None:
    """One case; prints JSON."""
    case = (CASES | ON_CUDA)[name]
    asyncio.run(trained(SMALL, lambda _: None))  # what libraries and kernels take is not the run's
    watch = Card() if torch.cuda.is_available() else Resident()
    config = recipe(case)
    planner = memory.Planner(config, model_config(case["shape"]), accelerator() or host(), prompt_tokens=case["prompt"])
    plan = planner.plan(config)
    asyncio.run(trained(case, watch.note))
    planned = {line.name: line.bytes for line in plan.lines if line.when != "sampling" and not line.beside}
    slack = not os.environ.get("MALLOC_MMAP_THRESHOLD_") or torch.cuda.is_available()
    left_out = {"programs", "driver"} | (set() if slack else {"slack"})
    total = sum(amount for name, amount in planned.items() if name not in left_out)
    peak = max(row["peak"] for what, row in watch.rows.items() if what.startswith(("pass", "update")))
    print(json.dumps({"case": name, "planned": planned, "plan": total, "peak": peak, "moments": watch.rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join([*CASES, *ON_CUDA])}")
    parser.add_argument("--json", type=Path, help="append results here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    for name in args.cases or (ON_CUDA if torch.cuda.is_available() else CASES):
        done = subprocess.run([sys.executable, __file__, "--child", name], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"== {name}: failed with {done.returncode}", flush=True)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        print(f"== {name}: plan {result['plan'] / 1e6:,.0f} MB, measured {result['peak'] / 1e6:,.0f} MB", end="")
        print(f", {result['plan'] / result['peak'] - 1:+.1%}")
        print("   plan:  " + ", ".join(f"{line} {amount / 1e6:,.0f}" for line, amount in result["planned"].items()))
        for what, row in result["moments"].items():
            print(f"   {what:<9}" + ", ".join(f"{key} {amount / 1e6:,.0f}" for key, amount in row.items()), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
