"""The flags of Atropos' trainer, as recipes; its names for checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem
from tandem.cli import app as cli
from tandem.cli import atropos as verb
from tandem.compat.atropos.checkpoints import CheckpointLayout, lay_out
from tandem.compat.atropos.options import RunningEngine, TrainerFlags, joined
from tandem.compat.atropos.rules import BOARD, LAYOUT, WAYS, translate
from tandem.compat.atropos.server import ServerFlags, divided
from tandem.compat.atropos.server import translate as translate_server
from tandem.config.loading import RunConfig, from_options, load
from tandem.errors import CheckpointError, ConfigError
from tandem.observability.loggers.base import RunInfo
from tandem.trainer.assemble import check_pairs, engine_needs
from tandem.transport.bridge import NCCL_FILE, NcclBridge

Run = Callable[..., tuple[int, str, str]]


def options(environ: Mapping[str, str] | None = None, **given: Any) -> dict[str, Any]:
    """The recipe of a command line that names a model and an environment."""
    given = {"model_name": "m", "env": "arithmetic", **given}
    return translate(TrainerFlags(**given), frozenset(given), environ or {}).options


def refusal(environ: Mapping[str, str] | None = None, **given: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        options(environ, **given)
    return str(refused.value)


# Each flag

STARTED = {"kind": "vllm", "port": 9001, "gpu_memory_utilization": 0.45, "max_model_len": 4096}
"""The engine that is started by default."""


def test_the_defaults_of_atropos() -> None:
    assert options() == {
        "model": "m",
        "steps": 10,
        "env": "arithmetic",
        "groups_per_step": 8,
        "group_size": 8,
        "max_lag": 2,
        "sampling": {"max_tokens": 2048},
        "advantage": {"kind": "grpo", "std": "population", "eps": 1e-8},
        "loss": {"kind": "grpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "reduction": "sequence"},
        "optimizer": {"kind": "adamw", "lr": 1e-5, "weight_decay": 0.01},
        "trains": {"kind": "full"},
        "engine": STARTED,
        "sync": {"kind": "restart", "every": 3},
        "dtype": "bfloat16",
        "micro_batch_tokens": 4096,
        "context": 2048,
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 3},
        "sinks": [
            "console",
            {"kind": "tandem.compat.atropos.checkpoints:CheckpointLayout", "save_path": "trained_model_checkpoints"},
        ],
        "runs": "logs",
    }


LORA = {"kind": "lora", "rank": 16, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}
MEETING = {"host": "localhost", "port_number": 29500}


@pytest.mark.parametrize(
    ("mode", "trains", "sync"),
    [
        ("none", {"kind": "full"}, {"kind": "restart", "every": 3}),
        ("shared_vllm", {"kind": "full"}, {"kind": "shared"}),
        ("lora_only", LORA, {"kind": "hotswap", "every": 3}),
        ("lora_restart", LORA, {"kind": "restart", "every": 3}),
        ("lora_nccl", LORA, {"kind": "broadcast", "every": 1, **MEETING}),
    ],
)
def test_each_way_has_its_pair(mode: str, trains: dict[str, Any], sync: dict[str, Any]) -> None:
    recipe = options(weight_bridge_mode=mode)
    assert (recipe["trains"], recipe["sync"]) == (trains, sync)
    assert recipe.get("max_lag", 0) == sync.get("every", 1) - 1


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model_name": ({"model_name": "other"}, {"model": "other"}),
    "env": ({"env": "gsm8k"}, {"env": "gsm8k"}),
    "atropos_url": ({"env": None, "atropos_url": "http://x"}, {"broker": "http://x", "max_lag": 6}),
    "group_size": ({"group_size": 16}, {"group_size": 16, "groups_per_step": 4}),
    "vllm_url": (
        {"vllm_url": ("http://a:1",), "weight_bridge_mode": "lora_only"},
        {"engine": {"kind": "vllm", "urls": ["http://a:1"]}},
    ),
    "lr": ({"lr": 0.5}, {"optimizer": {"kind": "adamw", "lr": 0.5, "weight_decay": 0.01}}),
    "training_steps": ({"training_steps": 7}, {"steps": 7}),
    "batch_size": ({"batch_size": 4}, {"groups_per_step": 16, "micro_batch_tokens": 8192}),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 4}, {"groups_per_step": 1}),
    "seq_len": ({"seq_len": 64}, {"context": 64, "micro_batch_tokens": 128, "sampling": {"max_tokens": 64}}),
    "warmup_steps": (
        {"warmup_steps": 3},
        {"optimizer": {"kind": "adamw", "lr": 1e-5, "weight_decay": 0.01, "warmup_steps": 3}},
    ),
    "clip_eps": (
        {"clip_eps": 0.1},
        {"loss": {"kind": "grpo", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": None, "reduction": "sequence"}},
    ),
    "optimizer": (
        {"optimizer": "adamw_8bit"},
        {"optimizer": {"kind": "adamw8bit", "lr": 1e-5, "weight_decay": 0.01}},
    ),
    "adafactor_scale_parameter": (
        {"optimizer": "adafactor", "adafactor_scale_parameter": True},
        {"optimizer": {"kind": "adafactor", "lr": 1e-5, "relative_rate": True}},
    ),
    "train_layer_indices": (
        {"train_layer_indices": "0-3, 10"},
        {"trains": {"kind": "full", "layers": [0, 1, 2, 3, 10]}},
    ),
    "save_path": ({"save_path": "x"}, {"sinks": ["console", {"kind": LAYOUT, "save_path": "x"}]}),
    "checkpoint_interval": ({"checkpoint_interval": 0, "training_steps": 9}, {"checkpoint": {"every": 9}}),
    "use_shared_memory": (
        {"use_shared_memory": True, "weight_bridge_mode": "shared_vllm"},
        {"sync": {"kind": "broadcast", "every": 1}, "trains": {"kind": "full"}},
    ),
    "vllm_port": (
        {"vllm_port": 5},
        {"engine": {**STARTED, "port": 5}},
    ),
    "vllm_restart_interval": (
        {"vllm_restart_interval": 5},
        {"sync": {"kind": "restart", "every": 5}, "max_lag": 4},
    ),
    "vllm_gpu": (
        {"vllm_gpu": 1},
        {"engine": {**STARTED, "devices": ["1"]}},
    ),
    "gpu_memory_utilization": (
        {"gpu_memory_utilization": 0.3},
        {"engine": {**STARTED, "gpu_memory_utilization": 0.3}},
    ),
    "max_model_len": (
        {"max_model_len": 2048},
        {"engine": {**STARTED, "max_model_len": 2048}},
    ),
    "dtype": ({"dtype": "float32"}, {"dtype": "float32"}),
    "lora_r": ({"lora_r": 8, "weight_bridge_mode": "lora_only"}, {"trains": {**LORA, "rank": 8}}),
    "lora_alpha": ({"lora_alpha": 8, "weight_bridge_mode": "lora_only"}, {"trains": {**LORA, "alpha": 8}}),
    "lora_target_modules": (
        {"lora_target_modules": "all-linear", "weight_bridge_mode": "lora_only"},
        {"trains": {**LORA, "target_modules": "all-linear"}},
    ),
    "lora_layer_indices": (
        {"lora_layer_indices": "2", "weight_bridge_mode": "lora_only"},
        {"trains": {**LORA, "layers": [2]}},
    ),
    "nccl_init_method": (
        {"nccl_init_method": "tcp://a:1", "weight_bridge_mode": "lora_nccl"},
        {"sync": {"kind": "broadcast", "every": 1, "host": "a", "port_number": 1}},
    ),
    "nccl_sync_every_step": (
        {"nccl_sync_every_step": False, "vllm_restart_interval": 2, "weight_bridge_mode": "lora_nccl"},
        {"sync": {"kind": "broadcast", "every": 2, **MEETING}, "max_lag": 1},
    ),
    "num_inference_nodes": (
        {
            "num_inference_nodes": 2, "vllm_url": ("http://a:1", "http://b:1"), "init_method": "tcp://a:2",
            "world_size": 3, "weight_bridge_mode": "shared_vllm",
        },
        {
            "sync": {"kind": "broadcast", "every": 1, "host": "a", "port_number": 2}, "trains": {"kind": "full"},
            "engine": {"kind": "vllm", "urls": ["http://a:1", "http://b:1"]},
        },
    ),
    "use_wandb": (
        {"use_wandb": True, "wandb_project": "p", "wandb_group": "g", "save_path": "x"},
        {
            "sinks": [
                "console", {"kind": BOARD, "project": "p", "group": "g"},
                {"kind": LAYOUT, "save_path": "x"},
            ]
        },
    ),
    "log_dir": ({"log_dir": "there"}, {"runs": "there"}),
}  # fmt: skip
"""By flag: a command line with it, and what that changes."""


@pytest.mark.parametrize("flag", CHANGES)
def test_each_flag_changes_the_recipe(flag: str) -> None:
    given, changed = CHANGES[flag]
    recipe = options(**given)
    assert {name: recipe[name] for name in changed} == changed
    rest = {name: value for name, value in given.items() if name != flag}
    assert flag in ("model_name", "env") or recipe != without(flag, rest)


def without(flag: str, rest: dict[str, Any]) -> object:
    """The recipe of the other flags, or why there is none."""
    try:
        return options(**rest)
    except ConfigError as error:
        return str(error)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weight_bridge_mode": ({"weight_bridge_mode": "lora"}, "no way 'lora'; ways: none, shared_vllm, lora_only,"),
    "nccl_world_size": ({"nccl_world_size": 3, "weight_bridge_mode": "lora_nccl"}, "its engines are 2; name others"),
    "trainer_rank": ({"trainer_rank": 1}, "the trainer is one process, rank 0"),
    "world_size": ({"world_size": 2}, "the trainer and 0 engines on other nodes are 1"),
    "atropos_url": ({"env": None, "atropos_url": "x:8000"}, "must begin with http://"),
    "lora_layer_indices": ({"lora_layer_indices": "3-1", "weight_bridge_mode": "lora_only"}, "'3-1' is neither a"),
    "vllm_gpu": ({"vllm_gpu": 1, "weight_bridge_mode": "shared_vllm"}, "choose it by CUDA_VISIBLE_DEVICES"),
    "num_inference_nodes": (
        {"num_inference_nodes": 2, "weight_bridge_mode": "lora_only", "vllm_url": ("http://a",)},
        "2 engines on other nodes need 2 addresses, and 1 are named",
    ),
    "dtype": ({"dtype": "float64"}, "not float64"),
    "device": ({"device": "tpu"}, "'tpu' is neither cuda, cuda:N nor cpu"),
    "optimizer": ({"optimizer": "sgd"}, "there is no 'sgd'; choose from adamw, adamw_8bit, adamw_cpu, adafactor"),
    "adafactor_relative_step": (
        {"optimizer": "adafactor", "adafactor_relative_step": True},
        "the rate is --lr, and Adafactor cannot choose it too",
    ),
    "kl_coef": ({"kl_coef": 0.1}, "no loss has a penalty on the distance to the weights that sampled"),
    "no_reference_logprobs": ({"no_reference_logprobs": True}, "loss=reinforce"),
    "distill_enabled": ({"distill_enabled": True}, "no loss reads a teacher's distill_token_ids"),
    "group_size": ({"group_size": 7}, "64 sequences, which are no whole number of groups of 7"),
    "gradient_accumulation_steps": (
        {"batch_size": 1, "gradient_accumulation_steps": 1},
        "two answers to one task at least",
    ),
    "batch_size": ({"batch_size": 0}, "at least 1"),
    "clip_eps": ({"clip_eps": 1.5}, "between 0 and 1"),
}
"""By flag: a command line that asks for what cannot be had, and the reason."""


@pytest.mark.parametrize("flag", REFUSED)
def test_what_cannot_be_had_is_refused(flag: str) -> None:
    given, message = REFUSED[flag]
    told = refusal(**given)
    assert f"--{flag.replace('_', '-')}: " in told
    assert message in told


NOTED: dict[str, tuple[dict[str, Any], str]] = {
    "single_copy": ({"single_copy": True}, "it changes nothing unless weights are shared"),
    "use_cuda_ipc": ({"use_cuda_ipc": True, "weight_bridge_mode": "shared_vllm"}, "sync shared is always one copy"),
    "use_shared_memory": ({"use_shared_memory": True}, "it belongs to shared_vllm"),
    "lora_dropout": ({"lora_dropout": 0.05, "weight_bridge_mode": "lora_only"}, "0.05 is left out: the policy that is"),
    "init_method": ({"init_method": "tcp://a:1"}, "unless there are engines on other nodes"),
    "atropos_url": ({"atropos_url": "http://x"}, "with --env, which is where groups come from"),
    "wandb_project": ({"wandb_project": "p"}, "without --use-wandb"),
    "wandb_group": ({"wandb_group": "p"}, "without --use-wandb"),
    "lora_r": ({"lora_r": 16}, "with --weight-bridge-mode none, which trains no adapter"),
    "lora_alpha": ({"lora_alpha": 16, "weight_bridge_mode": "shared_vllm"}, "which trains no adapter"),
    "train_layer_indices": ({"train_layer_indices": "1", "weight_bridge_mode": "lora_only"}, "--lora-layer-indices"),
    "nccl_init_method": ({"nccl_init_method": "tcp://a:1"}, "it belongs to lora_nccl"),
    "nccl_sync_every_step": ({"nccl_sync_every_step": True}, "it belongs to lora_nccl"),
    "vllm_restart_interval": (
        {"vllm_restart_interval": 3, "weight_bridge_mode": "shared_vllm"},
        "which syncs every step",
    ),
    "weight_bridge_mode": (
        {"vllm_url": ("http://a",), "weight_bridge_mode": "none"},
        "none restarts the engine, but the one at http://a was not started here and is left running: weights are",
    ),
    "vllm_port": ({"vllm_url": ("http://a",), "vllm_port": 1, "weight_bridge_mode": "lora_only"}, "which has the port"),
    "gpu_memory_utilization": (
        {"vllm_url": ("http://a",), "gpu_memory_utilization": 0.45, "weight_bridge_mode": "lora_only"},
        "on an engine that runs already",
    ),
    "vllm_config_path": ({"vllm_config_path": "x", "weight_bridge_mode": "lora_only"}, "unless weights are shared"),
    "max_model_len": ({"max_model_len": 100}, "answers end at 100 tokens, below --seq-len 2048"),
    "dtype": ({"dtype": "auto"}, "auto is bfloat16, in which Atropos' trainer computes"),
    "adafactor_scale_parameter": ({"adafactor_scale_parameter": True}, "with --optimizer adamw"),
    "distill_coef": ({"distill_coef": 0.2}, "without --distill-enabled"),
    "distill_temperature": ({"distill_temperature": 2.0}, "without --distill-enabled"),
    "debug_loading": ({"debug_loading": True}, "tandem --debug shows an error's traceback"),
}
"""By flag: a command line that it does not change, or changes otherwise than in Atropos, and what is told."""


@pytest.mark.parametrize("flag", NOTED)
def test_what_cannot_matter_is_noted(flag: str) -> None:
    given, message = NOTED[flag]
    given = {"model_name": "m", "env": "arithmetic", **given}
    notes = translate(TrainerFlags(**given), frozenset(given), {}).notes
    (told,) = [note for note in notes if note.startswith(f"--{flag.replace('_', '-')}: ")]
    assert message in told


@pytest.mark.parametrize(
    ("batch", "steps", "size"), [(1, 4, 4), (2, 16, 8), (4, 4, 8), (2, 32, 8), (3, 2, 6), (1, 11, 11), (5, 3, 5)]
)
def test_the_group_follows_the_batch_where_nobody_set_it(batch: int, steps: int, size: int) -> None:
    recipe = options(batch_size=batch, gradient_accumulation_steps=steps)
    assert (recipe["group_size"], recipe["groups_per_step"]) == (size, batch * steps // size)


@pytest.mark.parametrize(
    ("device", "seen", "becomes"),
    [
        ("cuda", None, {}),
        ("cuda:0", "3", {}),
        ("cuda:2", None, {"CUDA_VISIBLE_DEVICES": "2"}),
        ("cuda:1", "4,7", {"CUDA_VISIBLE_DEVICES": "7"}),
        ("cpu", None, {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_the_device(device: str, seen: str | None, becomes: dict[str, str]) -> None:
    given = {"model_name": "m", "env": "arithmetic", "device": device}
    environ = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    assert translate(TrainerFlags(**given), frozenset(given), environ).environ == becomes
    assert "is not among CUDA_VISIBLE_DEVICES=4,7" in refusal({"CUDA_VISIBLE_DEVICES": "4,7"}, device="cuda:2")


def test_the_optimizers_are_those_of_atropos() -> None:
    """Of its optimizers torch's and bitsandbytes' AdamW decay weights by 0.01, and Adafactor's rate is absolute."""
    found = {name: options(optimizer=name)["optimizer"] for name in ("adamw", "adamw_8bit", "adamw_cpu", "adafactor")}
    assert [found[name].get("weight_decay") for name in found] == [0.01, 0.01, 0.01, None]
    assert found["adafactor"] == {"kind": "adafactor", "lr": 1e-5, "relative_rate": False}


@pytest.mark.parametrize(
    ("mode", "way"),
    [("none", "broadcast"), ("lora_restart", "hotswap"), ("lora_only", "hotswap"), ("shared_vllm", "shared")],
)
def test_an_engine_that_serves_already_is_used_and_never_restarted(mode: str, way: str) -> None:
    given = {"model_name": "m", "env": "arithmetic", "weight_bridge_mode": mode}
    running = RunningEngine(url="http://localhost:9001", bridge="b.json" if way == "shared" else None)
    recipe = translate(TrainerFlags(**given), frozenset(given), {}, running).options
    assert recipe["engine"] == {"kind": "vllm", "urls": ["http://localhost:9001"]}
    assert recipe["sync"]["kind"] == way
    assert recipe["sync"].get("bridge") == running.bridge
    config = from_options(recipe, (), Path("x")).config
    check_pairs(config)


def test_without_an_environment_groups_come_from_a_server() -> None:
    recipe = options(env=None, weight_bridge_mode="shared_vllm")
    assert (recipe["broker"], recipe["max_lag"]) == ("http://localhost:8000", 4)
    assert "env" not in recipe
    assert recipe["engine"] == {**STARTED, "require_api_key": False}, "environments elsewhere have no key"
    assert "evaluate" not in recipe
    flags = TrainerFlags(model_name="m", env=None)
    assert "more than 6 steps old (max_lag)" in translate(flags, frozenset(), {}).notes[0]


def test_no_flag_is_accepted_and_ignored() -> None:
    """Every flag changes the recipe, is told or is refused; benchmark changes what is printed."""
    assert {field.name for field in dataclasses.fields(TrainerFlags)} <= {*CHANGES, *REFUSED, *NOTED, "benchmark"}


def test_all_mistakes_are_told_at_once() -> None:
    told = refusal(dtype="float8", group_size=7, trainer_rank=2)
    assert told.startswith("the command line has 3 problems:\n")


def test_the_environments_variables() -> None:
    urls = {"vllm_url": ("http://a:1",), "weight_bridge_mode": "shared_vllm"}
    environ = {"NUM_INFERENCE_NODES": "1", "MASTER_ADDR": "node", "MASTER_PORT": "99", "LOGDIR": "elsewhere"}
    recipe = options(environ, **urls)
    assert recipe["sync"] == {"kind": "broadcast", "every": 1, "host": "node", "port_number": 99}
    assert recipe["runs"] == "elsewhere"
    assert options(environ, num_inference_nodes=0, **urls)["sync"] == {"kind": "shared"}
    assert options(environ, log_dir="here", **urls)["runs"] == "here"
    assert "env:// reads MASTER_PORT" in refusal({**environ, "MASTER_PORT": ""}, **urls)
    assert "env:// reads MASTER_ADDR" in refusal({"NUM_INFERENCE_NODES": "1"}, **urls)
    assert "NUM_INFERENCE_NODES, of the environment: it must be" in refusal({"NUM_INFERENCE_NODES": "two"}, **urls)
    assert "NUM_INFERENCE_NODES, of the environment: 1 engines on other nodes need" in refusal(environ)


def test_a_meeting_place_has_a_host_and_a_port() -> None:
    for place in ("file:///tmp/x", "tcp://host"):
        told = refusal(nccl_init_method=place, weight_bridge_mode="lora_nccl")
        assert told == f"--nccl-init-method: {place} is not written as tcp://HOST:PORT"


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (
            {"weight_bridge_mode": "lora_only"},
            "--lora-dropout: 0.05 is left out: the policy that is scored must be the policy that sampled",
        ),
        ({"weight_bridge_mode": "lora_only", "lora_dropout": 0.0}, None),
        ({"weight_bridge_mode": "shared_vllm"}, None),
        ({"weight_bridge_mode": "shared_vllm", "single_copy": True}, "--single-copy: sync shared is always one copy"),
        (CHANGES["num_inference_nodes"][0], "memory cannot be shared between nodes, so full weights are broadcast"),
    ],
)
def test_notes_say_what_differs(given: dict[str, Any], note: str | None) -> None:
    given = {"model_name": "m", "env": "arithmetic", **given}
    notes = translate(TrainerFlags(**given), frozenset(given), {}).notes
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


@pytest.mark.parametrize("given", [*({"weight_bridge_mode": way} for way in WAYS), *(g for g, _ in CHANGES.values())])
def test_the_recipe_loads_and_its_parts_go_together(given: dict[str, Any]) -> None:
    config = from_options(options(**given), (), Path("x")).config
    assert isinstance(config.sinks[-1], CheckpointLayout)
    check_pairs(config)


# The command line


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the verb in an empty folder: arguments in; exit code, stdout and stderr out."""
    monkeypatch.chdir(tmp_path)
    for name in ("LOGDIR", "NUM_INFERENCE_NODES", "MASTER_ADDR", "MASTER_PORT", "TANDEM_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(verb, "running_engine", lambda flags, environ: None)  # whatever serves on this machine

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main(["atropos-grpo", *arguments])
        printed = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, printed.out, printed.err

    return call


def test_modules_may_be_words_of_their_own() -> None:
    assert joined(["--lora-target-modules", "q", "v", "--lr", "1"]) == ["--lora-target-modules=q v", "--lr", "1"]
    assert joined(["--lora-target-modules=q", "v", "env.path=x"]) == ["--lora-target-modules=q v", "env.path=x"]
    assert joined(["--lr", "1", "a=b"]) == ["--lr", "1", "a=b"]


def test_show_prints_the_recipe(run: Run) -> None:
    code, out, err = run(
        "--model", "m", "--env", "gsm8k", "--weight-bridge-mode", "lora_nccl",
        "--lora-target-modules", "q_proj", "o_proj",
        "--no-nccl-sync-every-step", "--vllm-restart-interval", "2", "--vllm-gpu-memory-utilization", "0.3",
        "env.path=rows.jsonl", "seed=3", "--show",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.startswith("# --lora-dropout: ")
    recipe = yaml.safe_load(out)
    assert recipe["trains"]["target_modules"] == ["q_proj", "o_proj"]
    assert recipe["sync"] == {"kind": "broadcast", "every": 2, **MEETING}
    assert recipe["engine"]["gpu_memory_utilization"] == 0.3
    assert (recipe["env"], recipe["seed"]) == ({"kind": "gsm8k", "path": "rows.jsonl"}, 3)
    assert not list(Path().iterdir())


def test_show_refuses_what_training_would(run: Run) -> None:
    code, out, err = run("--model", "m", "--env", "gsm8k", "--lr", "-1", "--warmup-steps", "-3", "--show")
    assert (code, out) == (2, "")
    assert "optimizer.lr must" in err
    assert "optimizer.warmup_steps must" in err


def test_zeros_are_given_values(run: Run) -> None:
    start = ["--model-name", "m", "--env", "gsm8k", "--weight-bridge-mode", "lora_only", "--show"]
    code, out, _ = run(*start, "--lora-dropout", "0", "--checkpoint-interval", "0")
    assert code == 0
    assert "dropout" not in out
    assert yaml.safe_load(out)["checkpoint"] == {"every": 10}


def test_mistakes_are_told_before_anything_loads(run: Run) -> None:
    code, out, err = run("--model-name", "m", "--dtype", "int8")
    assert (code, out) == (2, "")
    assert err.startswith("tandem: --dtype: Tandem trains bfloat16 or float32, not int8")
    code, _, err = run("--env", "gsm8k")
    assert code == 2
    assert "--model-name" in err
    assert run("--model-name", "m", "--env", "x", "--leraning-rate", "1")[0] == 2
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_help_has_every_flag_with_its_default(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    text = " ".join(out.split())
    for field in dataclasses.fields(TrainerFlags):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "Learning rate. Default: 1e-05." in text


# The engine's server


def test_other_options_of_vllm_are_handed_on() -> None:
    words = ["--quantization", "fp8", "--trust-remote-code", "engine.python=x", "--swap-space=4", "seed=3"]
    assert divided(words) == (
        {"quantization": "fp8", "trust_remote_code": True, "swap_space": "4"},
        ["engine.python=x", "seed=3"],
    )


@pytest.mark.parametrize(
    ("given", "environ", "notes"),
    [
        ({"dtype": "bfloat16"}, {}, []),
        ({}, {}, ["--dtype: auto is bfloat16"]),
        ({"dtype": "bfloat16", "max_loras": 1, "enable_lora": True}, {}, ["--max-loras: it is 2"]),
        ({"dtype": "bfloat16", "log_level": "info"}, {}, ["--log-level: it changes nothing: "]),
        (
            {"dtype": "bfloat16", "enable_lora": True},
            {"VLLM_ENABLE_SHARED_WEIGHTS": "1"},
            ["VLLM_ENABLE_SHARED_WEIGHTS: with --enable-lora adapters are served"],
        ),
    ],
)
def test_a_server_s_notes(given: dict[str, Any], environ: dict[str, str], notes: list[str]) -> None:
    found = translate_server(ServerFlags(model="m", **given), frozenset(given), {}, environ)
    assert [told.startswith(note) for told, note in zip(found.notes, notes, strict=True)] == [True] * len(notes)
    assert found.environ == {"LOGDIR": "."}, "where Atropos writes the file too"
    assert translate_server(ServerFlags(model="m"), frozenset(), {}, {"LOGDIR": "x"}).environ == {}


def test_a_server_has_room_for_versions_of_an_adapter(tiny_model: Path) -> None:
    flags = ServerFlags(model=str(tiny_model), enable_lora=True, max_loras=4)
    config = from_options(translate_server(flags, frozenset(), {}, {}).options, (), Path("x")).config
    assert engine_needs(config, None).versions == 4


def test_a_server_refuses_what_it_cannot_do() -> None:
    given = {"ssl_keyfile": "k", "ssl_certfile": "c"}
    with pytest.raises(ConfigError, match=r"has 2 problems:\n  --ssl-keyfile: there is no TLS here"):
        translate_server(ServerFlags(model="m", **given), frozenset(given), {}, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--dtype: it is bfloat16 or float32, not int8"):
        translate_server(ServerFlags(model="m", dtype="int8"), frozenset(), {}, {})


# Checkpoints


def fake_run(folder: Path, *steps: int, kind: str = "full", every: int = 2, last: int = 4) -> Path:
    """A run's folder with checkpoints in which only the files' names are real."""
    inside = {"full": "model", "lora": "adapter"}[kind]
    prefix = {"full": "", "lora": "adapter_"}[kind]
    weights = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}[kind]
    for step in steps:
        checkpoint = folder / "checkpoints" / f"{step:06d}" / inside
        checkpoint.mkdir(parents=True)
        for name in (weights, f"{prefix}config.json", "README.md", "tokenizer.json", "tokenizer_config.json"):
            (checkpoint / name).write_text(f"{name} of {folder.name} {step}")
        (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    recipe = {"steps": last, "checkpoint": {"every": every}, "trains": {"kind": kind}}
    (folder / "config.yaml").write_text(json.dumps(recipe))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("full", {"step_2", "step_4", "final_model", "tokenizer"}),
        ("lora", {"adapter_step_2", "adapter_step_4", "final_adapter", "tokenizer"}),
    ],
)
def test_checkpoints_get_their_names(tmp_path: Path, kind: str, expected: set[str]) -> None:
    folder, save = fake_run(tmp_path / "run", 2, 4, kind=kind), tmp_path / "a" / "save"
    written = lay_out(folder, save)
    assert {path.name for path in written} == names(save) == expected
    assert names(save / "tokenizer") == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    final = save / min(expected, key=lambda name: not name.startswith("final"))
    assert (final / "tokenizer.json").read_text() == "tokenizer.json of run 4"
    assert (save / "tokenizer" / "tokenizer.json").read_text() == "tokenizer.json of run 4"
    assert lay_out(folder, save) == []


def test_the_last_step_alone_where_no_interval_asks_for_more(tmp_path: Path) -> None:
    lay_out(fake_run(tmp_path / "a", 4, every=4), tmp_path / "s")
    assert names(tmp_path / "s") == {"final_model", "tokenizer"}
    lay_out(fake_run(tmp_path / "b", 3, 4, every=3), tmp_path / "t")
    assert names(tmp_path / "t") == {"step_3", "final_model", "tokenizer"}
    lay_out(fake_run(tmp_path / "c", 1), tmp_path / "u")  # stopped by hand
    assert names(tmp_path / "u") == {"step_1", "tokenizer"}


def test_half_a_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 2)
    (folder / "checkpoints" / ".000003.tmp" / "model").mkdir(parents=True)
    lay_out(folder, tmp_path / "s")
    assert names(tmp_path / "s") == {"step_2", "tokenizer"}


def test_a_folder_of_another_run_is_replaced_whole(tmp_path: Path) -> None:
    save = tmp_path / "s"
    (save / "step_2").mkdir(parents=True)
    (save / "step_2" / "stale.safetensors").write_text("stale")
    (save / ".step_2.tmp").mkdir()
    lay_out(fake_run(tmp_path / "run", 2), save)
    assert "stale.safetensors" not in names(save / "step_2")
    assert not [name for name in names(save) if name.startswith(".")]
    # Of the same sizes too.
    other = fake_run(tmp_path / "nur", 2)
    os.utime(other / "checkpoints" / "000002" / "model" / "model.safetensors", ns=(1, 1))
    lay_out(other, save)
    assert (save / "step_2" / "model.safetensors").read_text() == "model.safetensors of nur 2"


def test_a_copy_that_fails_leaves_nothing_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: Path, target: Path, **options: Any) -> None:
        target.mkdir(parents=True)
        raise OSError(28, "No space left on device")

    folder, save = fake_run(tmp_path / "run", 2), tmp_path / "s"
    monkeypatch.setattr("shutil.copytree", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        lay_out(folder, save)
    assert not names(save)


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "000002").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="000002/model cannot be copied"):
        lay_out(fake_run(tmp_path / "run"), tmp_path / "s")


def test_the_sink_copies_while_the_run_goes_on(tmp_path: Path) -> None:
    folder, save = fake_run(tmp_path / "run", 2, 4), tmp_path / "s"
    config = {"steps": 4, "checkpoint": {"every": 2}, "trains": {"kind": "full"}}
    writer = CheckpointLayout(save_path=str(save)).open(RunInfo(name="run", folder=folder, steps=4, config=config))
    writer.event("published", {"step": 1})
    assert not save.exists()
    writer.event("checkpoint_saved", {"step": 2, "path": str(folder / "checkpoints" / "000002")})
    writer.event("checkpoint_saved", {"step": 4, "path": str(folder / "checkpoints" / "000004")})
    assert (save / "step_2" / "model.safetensors").is_file()  # before the first may be pruned
    writer.close()
    assert names(save) == {"step_2", "step_4", "final_model", "tokenizer"}


def test_the_file_of_the_process_group_is_copied_as_it_is_formed_anew(tmp_path: Path) -> None:
    folder, save = fake_run(tmp_path / "run", 2, 4), tmp_path / "my sa ve"
    config = {"steps": 4, "checkpoint": {"every": 2}, "trains": {"kind": "full"}}
    writer = CheckpointLayout(save_path=str(save)).open(RunInfo(name="run", folder=folder, steps=4, config=config))
    for port in (1, 2):
        group = NcclBridge(
            nccl_init_method=f"tcp://here:{port}", world_size=2, param_metadata={"w": {"shape": [1]}}, param_mappings={}
        )
        group.write(folder)
        writer.event("published", {"step": port})
        assert NcclBridge.read(save) == group
    writer.close()
    NcclBridge.read(save)
    (save / NCCL_FILE).unlink()
    assert save / NCCL_FILE in lay_out(folder, save)
    assert NcclBridge.read(save) == group
    assert save / NCCL_FILE not in lay_out(folder, save)


def test_the_sink_tells_what_it_could_not_copy(tmp_path: Path) -> None:
    config = {"steps": 4, "checkpoint": {"every": 2}, "trains": {"kind": "full"}}
    (tmp_path / "s").write_text("a file in the way")
    writer = CheckpointLayout(save_path=str(tmp_path / "s")).open(
        RunInfo(name="r", folder=tmp_path, steps=4, config=config)
    )
    folder = fake_run(tmp_path / "run", 2)
    writer.event("checkpoint_saved", {"step": 2, "path": str(folder / "checkpoints" / "000002")})
    with pytest.raises(CheckpointError, match="cannot be copied"):
        writer.close()


def test_other_trainings_have_no_name(tmp_path: Path) -> None:
    info = RunInfo(name="r", folder=tmp_path, steps=1, config={"trains": {"kind": "my:Own"}})
    with pytest.raises(ConfigError, match="no name for checkpoints of trains: my:Own"):
        CheckpointLayout(save_path="s").open(info)


def test_the_benchmark_sums_up_what_was_written_down(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "time": 1.0, "metrics": {"seconds/step": 2.0, "seconds/wait": 1.0, "memory/rss_gb": 3.5}},
        {"step": 2, "time": 5.0, "metrics": {"seconds/step": 4.0, "seconds/wait": 2.0, "memory/rss_gb": 2.5}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"time": 0.0, "event": "run_started", "step": 0}, {"time": 7.0, "event": "run_done", "step": 2}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    lines = [line.split("  ", 1) for line in verb.benchmark(tmp_path).splitlines()]
    assert {label: value.strip() for label, value in lines} == {
        "steps": "2",
        "mean step": "3.000 s",
        "mean sync": "not measured",
        "mean fetch": "1.500 s",
        "peak memory/rss_gb": "3.50 GB",
        "total": "7.0 s",
    }


# A run


def test_what_the_sink_missed_is_copied_at_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def train(config: RunConfig, *, resume: Path | None) -> Path:
        assert (config.steps, config.seed, resume) == (4, 3, None)
        return fake_run(Path("run"), 4)

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setitem(sys.modules, "tandem.trainer.assemble", fake)
    monkeypatch.setattr(tandem.trainer, "assemble", fake, raising=False)
    code, out, err = run(
        "--model", "m", "--env", "arithmetic", "--training-steps", "4", "--save-path", "saved",
        "engine=embedded", "sync=shared", "max_lag=0", "seed=3",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out == "done: run (tandem show run); report: run/report.html; checkpoints: saved\n"
    assert names(Path("saved")) == {"step_4", "final_model", "tokenizer"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("mode", ["none", "lora_only"])
def test_it_trains_and_its_checkpoints_load(run: Run, tiny_model: Path, mode: str) -> None:
    code, out, err = run(
        "--model-name", str(tiny_model), "--env", "arithmetic", "--weight-bridge-mode", mode, "--training-steps", "3",
        "--batch-size", "2", "--gradient-accumulation-steps", "4", "--group-size", "4", "--seq-len", "256",
        "--checkpoint-interval", "1", "--dtype", "float32", "--save-path", "saved", "--benchmark", "--lr", "1e-3",
        "engine=embedded", "sync=shared", "max_lag=0", "sampling.max_tokens=8", "flat_groups=keep", "threads=1",
        "checkpoint.keep=1",
    )  # fmt: skip
    assert code == 0, err
    assert "mean step" in out
    assert ("--lora-dropout: 0.05 is left out" in err) == (mode == "lora_only")
    lora = mode == "lora_only"
    step, final = ("adapter_step", "final_adapter") if lora else ("step", "final_model")
    assert names(Path("saved")) == {f"{step}_1", f"{step}_2", f"{step}_3", final, "tokenizer"}
    (folder,) = Path("logs").iterdir()
    assert names(folder / "checkpoints") == {"000003"}
    assert load(folder / "config.yaml").config.sinks[-1] == CheckpointLayout(
        save_path="saved"
    )  # so a resumed run goes on copying
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained("saved/tokenizer")
    if lora:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        assert "default" in PeftModel.from_pretrained(base, f"saved/{final}").peft_config
    else:
        AutoModelForCausalLM.from_pretrained(f"saved/{final}")
        AutoTokenizer.from_pretrained(f"saved/{final}")
