"""Two ranks on CPUs, however they are started: the same bits as ``ranks: 2``, and others' examples unchanged."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import build_tiny_model
from integration.vllm_runs import lines, metrics
from safetensors.torch import load_file
from support.compat_cases import axolotl_files, swift_files
from support.processes import start

from tandem.ports import free_port

pytestmark = pytest.mark.slow

SRC = Path(__file__).parents[2] / "src"
STEPS = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a model and a recipe."""
    place = tmp_path_factory.mktemp("launchers")
    build_tiny_model(place / "tiny")
    recipe = {
        "model": "tiny",
        "steps": STEPS,
        "env": {"kind": "arithmetic", "max_number": 4, "prompt": "{expression}="},
        "rewards": {"repetition": 1.0},
        "groups_per_step": 2,
        "group_size": 4,
        "zero_variance_groups": "keep",
        "sampling": {"max_tokens": 6},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "dtype": "bfloat16",
        "evaluate": {"tasks": 0},
        "loggers": [],
        "threads": 1,
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return place


def environment(**own: str) -> dict[str, str]:
    """That of a shell which no launcher has started."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    return plain | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | own


def run(place: Path, words: Sequence[str], *, module: str = "tandem", **own: str) -> str:
    """What a program prints, which ends well."""
    started = start(words, cwd=place, out=subprocess.PIPE, environment=environment(**own), module=module)
    with started as process:
        try:
            printed, _ = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, printed
    return printed


def torchrun(place: Path, words: Sequence[str]) -> str:
    """What two ranks of torchrun print, which end well."""
    options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    return run(place, [*options, "-m", "tandem", *words], module="torch.distributed.run")


def tandem(place: Path, words: Sequence[str], *environs: Mapping[str, str]) -> None:
    """Processes of one command line, each with an environment of its own, which run side by side and end well."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(start(words, cwd=place, out=subprocess.PIPE, environment=environment(**environ)))
            for environ in environs
        ]
        for process in started:
            stack.callback(process.kill)
        printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)


def train(name: str, *more: str) -> list[str]:
    return ["train", "recipe.yaml", f"name={name}", *more]


def weights(place: Path, name: str) -> dict[str, Any]:
    """Of the last checkpoint."""
    return load_file(place / f"runs/{name}/checkpoints/{STEPS:06d}/model/model.safetensors")


def same(place: Path, name: str) -> bool:
    """Whether a run has the weights of the reference, to the bit."""
    ours, reference = weights(place, name), weights(place, "reference")
    assert ours.keys() == reference.keys()
    return all(ours[key].equal(reference[key]) for key in reference)


@pytest.fixture(scope="module")
def reference(place: Path) -> Path:
    """A run that started its second rank itself; its weights have moved."""
    tandem(place, train("reference", "ranks=2"), {})
    before = load_file(place / "tiny/model.safetensors")
    assert any(not weights(place, "reference")[key].equal(before[key]) for key in before)
    return place


def test_torchrun_gives_the_same_bits(reference: Path) -> None:
    torchrun(reference, train("torchrun"))
    assert same(reference, "torchrun")


def test_srun_gives_the_same_bits(reference: Path) -> None:
    """With the variables that srun sets for two tasks of one host; SLURM itself is not here."""
    step = {
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    tandem(reference, train("srun", "ranks=2"), *tasks)
    assert same(reference, "srun")


def test_ranks_that_disagree_with_the_launcher_end_the_run(reference: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks: 3, but torchrun started 2 processes"):
        torchrun(reference, train("disagree", "ranks=3"))


QUICK = (
    "engine=embedded",
    "sync=shared",
    "dtype=float32",
    "name=run",
    "runs=runs",
    "threads=1",
    "zero_variance_groups=keep",
)
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "offload_params": False,
        "cpu_ram_efficient_loading": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
    },
}


@pytest.mark.parametrize(
    ("shared", "shard"),
    [(FSDP2, "weights"), ({"deepspeed": "deepspeed_configs/zero1.json"}, "states")],
    ids=["FSDP2", "DeepSpeed zero1"],
)
def test_an_axolotl_file_trains_on_the_ranks_of_torchrun(shared: dict[str, Any], shard: str, tmp_path: Path) -> None:
    """With accelerate's or DeepSpeed's keys as they are; its batch is that of one rank."""
    build_tiny_model(tmp_path / "tiny")
    axolotl_files(tmp_path)
    options = {
        "base_model": "tiny",
        "rl": "grpo",
        "datasets": [{"path": "rows.jsonl", "type": "rewards.prompt_transform"}],
        "learning_rate": 1e-3,
        "micro_batch_size": 4,
        "max_steps": STEPS,
        "trl": {"num_generations": 4, "max_completion_length": 6, "reward_funcs": ["rewards.format_reward"]},
        **shared,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(options))
    printed = torchrun(tmp_path, ["train", "config.yaml", *QUICK])
    assert "ranks: 2; a step has" in printed
    assert list(metrics(tmp_path / "runs/run")) == [1, 2]
    assert [len(lines(tmp_path / f"runs/run/rollouts/{step:06d}.jsonl")) for step in (1, 2)] == [8, 8]
    saved = yaml.safe_load((tmp_path / "runs/run/config.yaml").read_text())
    assert (saved["ranks"], saved["groups_per_step"], saved["distributed"]["shard"]) == (2, 2, shard)


def test_ms_swifts_command_line_starts_its_own_ranks(tmp_path: Path) -> None:
    """``NPROC_PER_NODE=2 swift rlhf --deepspeed zero2``."""
    build_tiny_model(tmp_path / "tiny")
    swift_files(tmp_path)
    line = (
        "--rlhf_type grpo --model tiny --dataset rows.jsonl --reward_funcs repetition --num_generations 4 "
        "--train_type full --per_device_train_batch_size 4 --max_completion_length 6 --max_steps 2 --beta 0 "
        "--torch_dtype float32 --deepspeed zero2 --output_dir runs --run_name run"
    )
    run(tmp_path, ["swift", "rlhf", *line.split(), "threads=1"], NPROC_PER_NODE="2")
    assert list(metrics(tmp_path / "runs/run")) == [1, 2]
    assert [len(lines(tmp_path / f"runs/run/rollouts/{step:06d}.jsonl")) for step in (1, 2)] == [8, 8]
    assert (tmp_path / "runs/run/logs/rank-1.log").exists()
