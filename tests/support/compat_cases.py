"""Files and command lines of other systems, as ``unit/compat_golden.json`` lists them, and what they name.

Of each system the file has a least case, ``base``, and by name what differs from it: ``given`` is what is read
(``changes`` to the least file or command line, or all of a ``file``, ``line`` or ``flags``), the rest what it comes to.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_compat.commands.flags import repeated
from tandem_compat.swift.options import RLHF
from tandem_compat.table import ForeignOption

GOLDEN = Path(__file__).parents[1] / "unit" / "compat_golden.json"


def cases(system: str) -> dict[str, dict[str, Any]]:
    """What the golden file has of a system, by the case's name."""
    known: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())[system]
    return known


def examples(system: str) -> dict[str, dict[str, Any]]:
    """What is read in the examples of a system's documents, by what they show."""
    names = {name.removeprefix("example "): case for name, case in cases(system).items() if name.startswith("example ")}
    return {name: case["given"] for name, case in names.items() if not name.endswith(", served")}


# Axolotl

AXOLOTL: dict[str, Any] = {
    "base_model": "m",
    "rl": "grpo",
    "datasets": [{"path": "rows.jsonl", "type": "rewards.prompt_transform"}],
    "learning_rate": 1e-5,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_steps": 100,
    "trl": {"reward_funcs": ["rewards.accuracy_reward"]},
}
"""The least file that Axolotl takes, nearly."""

OVERRIDES = ("matmul=dtype", "engine.sleep=0")
"""Of what a test's machine may lack: torchao, or an accelerator."""

REWARDS = """
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
"""A module with the functions that Axolotl's examples name: their signatures are the documents'."""


_ZERO: dict[str, Any] = {
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
        "hysteresis": 2, "min_loss_scale": 1,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip
_ZERO3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "max_live_parameters": 0,
    "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True,
}  # fmt: skip
_ON_HOST = {"device": "cpu", "pin_memory": True}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero1": _ZERO,
    "zero2": _ZERO
    | {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "overlap_comm": True,
        }
    },
    "zero3_bf16": _ZERO | {"bf16": {"enabled": True}, "zero_optimization": _ZERO3},
    "zero3_bf16_cpuoffload_all": _ZERO
    | {
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _ZERO3 | {"offload_optimizer": _ON_HOST, "offload_param": _ON_HOST},
    },
}
"""Options as the files have them that Axolotl ships in its deepspeed_configs."""


def deepspeed_files(folder: Path) -> None:
    """DeepSpeed's files, and one of FSDP's."""
    (folder / "deepspeed_configs").mkdir(exist_ok=True)
    for name, options in DEEPSPEED.items():
        (folder / "deepspeed_configs" / f"{name}.json").write_text(json.dumps(options))
    fsdp = {"_note": "x", "fsdp": "shard_grad_op offload", "fsdp_config": {"fsdp_version": 2}}
    (folder / "fsdp.json").write_text(json.dumps(fsdp))


def axolotl_files(folder: Path) -> None:
    """What Axolotl's examples name, and a set of few rows."""
    deepspeed_files(folder)
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"question": f"{n}+2=", "answer": str(n + 2)} for n in range(40)]
    for name, count in {"rows": 40, "few": 4}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The least file with changes: options of a group by dotted path."""
    made = json.loads(json.dumps(AXOLOTL))
    for path, value in changes.items():
        group, _, name = path.rpartition(".")
        (made.setdefault(group, {}) if group else made)[name] = value
    return dict(made)


def axolotl_file(case: Mapping[str, Any]) -> str:
    """The file of a case."""
    return yaml.safe_dump(case["file"] if "file" in case else changed(case["changes"]), sort_keys=False)


# ms-swift

SWIFT = "--model m --dataset d.jsonl --reward_funcs accuracy --gradient_accumulation_steps 8 --max_steps 10"
"""The least command line."""

PLUGIN = """
from swift.plugin import ORM, orms

class Short(ORM):
    def __call__(self, completions, **kwargs):
        return [-len(text) / 100 for text in completions]

for name in ("math_acc", "math_format", "r1v_acc", "countdown", "code_reward", "code_format"):
    orms["external_" + name] = Short
"""


def swift_package(folder: Path) -> None:
    """As much of ms-swift as its documents' plug-ins import, in place of an installed one."""
    modules = {
        "__init__": "",
        "rewards": "class ORM:\n    def __init__(self, args=None, **_): self.args = args\nAsyncORM = ORM\norms = {}\n",
        "plugin": "from swift.rewards import AsyncORM, ORM, orms\n",
        "utils": "import logging\nget_logger = logging.getLogger\n",
    }
    for name, text in modules.items():
        path = folder / f"swift/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def forget_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import ms-swift anew, or not at all; folders of earlier tests may be on the path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path or not Path(path, "swift").is_dir()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
        monkeypatch.delitem(sys.modules, name)


def swift_files(folder: Path) -> None:
    """What ms-swift's examples name."""
    swift_package(folder)
    deepspeed_files(folder)
    examples = folder / "examples/train/grpo"
    (examples / "plugin").mkdir(parents=True)
    (examples / "prompt.txt").write_text("Think first.\n")
    (examples / "plugin/plugin.py").write_text(PLUGIN)
    (folder / "mine.py").write_text(
        "from swift.plugin import orms\norms['mine'] = lambda completions, **_: completions\n"
    )
    (folder / "system.txt").write_text("Think.\n")
    rows = [{"problem": f"{n}+2=", "solution": str(n + 2)} for n in range(40)]
    for name, count in {"rows": 40, "d": 40, "e": 7, "few rows.v2": 4}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))


def swift_words(line: str, table: Sequence[ForeignOption] = RLHF) -> dict[str, list[str]]:
    """A command line as the verb hands it on; an argument's older name is its newer one."""
    names = {name: argument.name for argument in table for name in (argument.name, *argument.also)}
    words = repeated(shlex.split(line), table)
    values: dict[str, list[str]] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        values.setdefault(names[flag.removeprefix("--")], []).append(value)
    return values
