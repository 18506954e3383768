"""What a recipe asks of vLLM: refused before anything is loaded where it cannot be, and else told to the server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tandem.cli.check import check
from tandem.config import loading as config
from tandem.engines.base import EngineRequirements
from tandem.engines.embedded.spec import Embedded
from tandem.engines.vllm.server.admission import PROBES
from tandem.engines.vllm.spec import Vllm
from tandem.errors import ConfigError
from tandem.trainer import assemble as run

SCHEDULER = "tandem.engines.vllm.speedups.scheduler"
THERE = "echo warning; echo True"
"""What an interpreter that has vLLM does when it is asked."""


def interpreter(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def recipe(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        yaml.safe_dump({"model": "m", "steps": 1, "env": "arithmetic", "runs": str(folder / "runs"), **changes})
    )
    return path


def command(**options: Any) -> list[str]:
    return Vllm(**options).command(EngineRequirements(model="m", dtype="float32"), 64, model="m", port=1)


def pairs(command: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(command, [*command[1:], ""], strict=True))


# Ports


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 70_000}])
def test_a_port_that_there_is_not_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="port must"):
        Vllm(**options)  # type: ignore[arg-type]


def test_an_engine_is_named_once() -> None:
    """Else it would be told to join a broadcast as two, and the group would not form."""
    with pytest.raises(ValueError, match="urls names 'http://x:1' twice"):
        Vllm(urls=("http://x:1", "http://y:1", "http://x:1/"))


# Keys


def test_a_started_engine_has_a_key_of_its_own_unless_it_is_to_be_open() -> None:
    keyed, open_to_all = Vllm(port=1)._server(0), Vllm(port=1, require_api_key=False)._server(0)
    assert len(keyed.key) > 20
    assert open_to_all.key == ""


def test_an_open_engine_is_this_machine_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs a host that this machine alone can reach, not"):
        Vllm(host="0.0.0.0", require_api_key=False)
    monkeypatch.setenv("A_KEY", "x")
    assert Vllm(port=1, require_api_key=False, api_key_variable="A_KEY")._server(0).key == "x"


# Where the model is


def test_on_one_gpu_the_worker_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    option = "--distributed-executor-backend"
    assert option not in command(), "on a CPU it has by itself"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (option, "mp") in pairs(command())
    assert option not in command(tensor_parallel_size=2), "several have by themselves"
    options = pairs(command(args={"distributed_executor_backend": "uni"}))
    assert [value for name, value in options if name == option][-1] == "uni", "the last one counts"


def test_a_seeded_prompt_is_computed_at_once_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    option = "--no-enable-chunked-prefill"
    assert option in command(seeded=True)
    assert option not in command()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert option not in command(seeded=True)


# Other options of the server


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_model_len": 5}, "set by Tandem"),
        ({"max-model-len": 5}, "set by Tandem"),
        ({"no_enable_prefix_caching": True}, "set by Tandem"),
        ({"kv_cache_memory_bytes": 5}, "set by Tandem"),
        ({"gpu_memory_util": 0.9}, "set by Tandem"),
        ({"limit_mm_per_prompt.image": 1}, "set by Tandem"),
    ],
    ids=str,
)
def test_options_that_are_not_free_are_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"args: {next(iter(args))} .*{says}"):
        Vllm(args=args)


def test_options_reach_the_server_also_those_that_are_off() -> None:
    args = {
        "enable_chunked_prefill": False,
        "async_scheduling": True,
        "block_size": 16,
        "compilation_config": {"mode": 0},
    }
    arguments = command(args=args)
    assert {"--no-enable-chunked-prefill", "--async-scheduling"} <= set(arguments)
    assert "--enable-chunked-prefill" not in arguments
    assert {("--block-size", "16"), ("--compilation-config", '{"mode": 0}')} <= set(pairs(arguments))


def test_a_scheduler_of_somebody_elses_takes_the_place_of_ours() -> None:
    for args, last in (({}, SCHEDULER), ({"scheduler_cls": "mine.Scheduler"}, "mine.Scheduler")):
        assert [value for name, value in pairs(command(args=args)) if name == "--scheduler-cls"][-1] == last


@pytest.mark.parametrize("option", ["enforce_eager", "enable_prefix_caching"])
def test_options_of_ours_are_on_or_off(option: str) -> None:
    name = option.replace("_", "-")
    for wanted, there, absent in ((True, f"--{name}", f"--no-{name}"), (False, f"--no-{name}", f"--{name}")):
        arguments = command(**{option: wanted})
        assert there in arguments
        assert absent not in arguments


def test_prompts_are_cached_where_vllm_does_so_by_itself() -> None:
    assert not [argument for argument in command() if "prefix-caching" in argument]


# What this machine lacks


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    cases = {
        "echo False": "there is none in it",
        "echo no such file >&2; exit 127": "no such file",
        "exit 1": "there is none",
    }
    for script, why in cases.items():
        python = interpreter(tmp_path, script)
        with pytest.raises(ConfigError, match=rf"engine\.python: {python} cannot run vLLM: {why}.*tandem doctor"):
            Vllm(python=python).check(folder=tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.python: /nowhere/python cannot be run.*tandem doctor"):
        Vllm(python="/nowhere/python").check(folder=tmp_path)
    python = interpreter(tmp_path, THERE)
    assert Vllm(python=python).check(folder=tmp_path) == f"vLLM, by {python}"


def test_a_check_does_not_claim_that_an_engine_elsewhere_runs(tmp_path: Path) -> None:
    checked = Vllm(urls=("http://127.0.0.1:1",)).check(folder=tmp_path)
    assert checked == (
        "expected at http://127.0.0.1:1; whether it runs is seen when a run starts, and a stock vLLM there is proven "
        "by a probe alone"
    )


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this interpreter has vLLM")
def test_the_trainers_own_interpreter_is_looked_into_by_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.python is not set.*has no vLLM; let engine\.python name one"):
        Vllm().check(folder=tmp_path)


def test_a_folder_that_an_engine_cannot_be_told_of_is_refused(tmp_path: Path) -> None:
    python, folder = interpreter(tmp_path, THERE), tmp_path / f"a{os.pathsep}b"
    with pytest.raises(ConfigError, match=r"':' in it; choose another name= or runs="):
        Vllm(python=python).check(folder=folder)
    with pytest.raises(ConfigError, match="choose another"):
        Vllm(python=python)._launch(EngineRequirements(model="m", dtype="float32", folder=folder), 64)
    assert "http://x:1" in Vllm(urls=("http://x:1",)).check(folder=folder)
    Embedded().check(folder=folder)


BEFORE: dict[str, tuple[dict[str, Any], str]] = {
    "no vLLM": ({"engine": {"kind": "vllm", "python": "/nowhere/python"}}, "/nowhere/python cannot be run"),
    "its rank": (
        {
            "engine": {"kind": "vllm", "urls": ["http://x:1"]},
            "trainable": {"kind": "lora", "rank": 999},
            "sync": "hotswap",
        },
        "not 999",
    ),
    "its name": ({"engine": "vllm", "name": "a:b"}, "choose another name="),
    "its key": (
        {"engine": {"kind": "vllm", "urls": ["http://x:1"], "api_key_variable": "NO_SUCH_KEY"}, "sync": "broadcast"},
        "NO_SUCH_KEY is not set in the environment",
    ),
}


@pytest.mark.parametrize("case", BEFORE)
def test_it_is_told_before_a_run_begins(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, says = BEFORE[case]
    path = recipe(tmp_path, **changes)
    with pytest.raises(ConfigError, match=says):
        asyncio.run(run.train(config.load(path).config, resume=None))
    assert not (tmp_path / "runs").exists()
    assert check(config.load(path).config, 1) == ConfigError.exit_code
    output = " ".join(capsys.readouterr().out.split())
    where = {"no vLLM": "engine engine.python", "its rank": "parts"}.get(case, "engine")
    assert f"problem {where}" in output
    assert says.split()[-1] in output


@pytest.mark.parametrize(
    ("answers", "options", "places"), [(4, {}, 64), (300, {}, 600), (4096, {}, 1024), (300, {"max_num_seqs": 32}, 32)]
)
def test_an_engine_has_room_for_two_steps_answers(answers: int, options: dict[str, Any], places: int) -> None:
    requirements = EngineRequirements(model="m", dtype="float32", answers=answers)
    words = Vllm(**options).command(requirements, 64, model="m", port=1)
    assert ("--max-num-seqs", str(places + PROBES)) in pairs(words)
