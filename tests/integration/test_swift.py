"""ms-swift's modes with a real vLLM: deployed apart by ``swift rollout``, or started by ``swift rlhf`` itself."""

from __future__ import annotations

import json
import os
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
from integration.vllm_runs import DTYPE, HEAD_DIM, engine, lines, metrics, needs_engine, published, same_logprobs, until
from support.compat_cases import swift_package

from tandem.ports import free_port

pytestmark = [needs_engine, pytest.mark.long]

PLUGIN = """
from swift.plugin import ORM, orms


class Letters(ORM):
    def __call__(self, completions, solution, **columns):
        return [sum(c.isalpha() for c in text) / max(1, len(text)) for text, _ in zip(completions, solution)]


orms["letters"] = Letters
"""
COMMON = ("--model", "tiny", "--torch_dtype", DTYPE)
STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a model, rows and a plug-in."""
    place = tmp_path_factory.mktemp("swift")
    build_tiny_model(place / "tiny", head_dim=HEAD_DIM)
    rows = [{"messages": [{"role": "user", "content": f"{i}+2="}], "solution": str(i + 2)} for i in range(8)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "plugin.py").write_text(PLUGIN)
    swift_package(place)
    return place


@contextmanager
def deployed(place: Path, verb: str, *more: str) -> Iterator[int]:
    """Where an engine that was deployed apart listens."""
    port, log_name = free_port(), f"{verb}.txt"
    words = ("--host", "0.0.0.0", "--port", str(port), "--vllm_max_model_len", "256", "--vllm_max_num_seqs", "32")
    serving = start(place, log_name, verb, *COMMON, *words, *more, *own())
    try:
        yield port
        assert serving.poll() is None, "a trainer does not end an engine that it did not start"
    finally:
        ended(serving)
    assert "ended" in (place / log_name).read_text()


@pytest.fixture(scope="module")
def port(place: Path) -> Iterator[int]:
    """Where an engine listens that takes whole weights, of one trainer after the other."""
    with deployed(place, "deploy") as port:
        yield port


def start(place: Path, log_name: str, *words: str) -> subprocess.Popen[bytes]:
    with (place / log_name).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tandem", "swift", *words],
            cwd=place,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def own() -> list[str]:
    """Options of Tandem's own that make the engine small enough for a test."""
    here = engine()
    names = ("python", "kv_cache_gb", "enforce_eager", "args", "gpu_memory_utilization")
    return [f"engine.{name}={json.dumps(here[name])}" for name in names if here.get(name) is not None]


def trained(place: Path, name: str, *words: str) -> tuple[dict[str, Any], str]:
    """A run of ``swift rlhf`` that has ended well, looked at from outside; its recipe and what it said."""
    training = start(
        place, f"{name}.txt", "rlhf", "--rlhf_type", "grpo", *COMMON, "--dataset", "rows.jsonl",
        "--external_plugins", "plugin.py", "--reward_funcs", "letters", "--num_generations", "4",
        "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_completion_length", "12",
        "--max_steps", str(STEPS), "--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--beta", "0.04",
        "--max_length", "100", "--output_dir", "out", "--run_name", name, "--log_completions", "true",
        "--use_vllm", "true", *words,
    )  # fmt: skip
    try:
        until(lambda: training.poll() is not None, "the end of training", 280)
        output = (place / f"{name}.txt").read_text()
        assert training.returncode == 0, output
    finally:
        ended(training)
    run = place / "out" / name
    assert list(metrics(run)) == list(range(1, STEPS + 1))
    same_logprobs(run)
    table = lines(run / "completions.jsonl")
    assert [row["step"] for row in table] == [[str(step)] * 8 for step in range(1, STEPS + 1)]
    for row in table:
        assert all("+2=" in prompt for prompt in row["prompt"])
        letters = [sum(c.isalpha() for c in text) / max(1, len(text)) for text in row["completion"]]
        assert row["letters"] == pytest.approx(letters)
    return yaml.safe_load((run / "config.yaml").read_text()), output


def server(port: int) -> tuple[str, ...]:
    at = ("--vllm_server_host", "0.0.0.0", "--vllm_server_port", str(port), "--vllm_server_timeout", "240")
    return ("--vllm_mode", "server", *at, "threads=1")


def test_an_adapter_travels_to_an_engine_elsewhere(place: Path) -> None:
    lora = ("--vllm_enable_lora", "true")
    with deployed(place, "rollout", *lora, "--vllm_max_lora_rank", "8") as port:
        recipe, _ = trained(place, "adapter", "--train_type", "lora", *lora, *server(port))
    assert (recipe["engine"]["urls"], recipe["sync"]["kind"]) == ([f"http://127.0.0.1:{port}"], "broadcast")
    assert set(published(place / "out/adapter")) == {1, 2, 3}


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_asynchronous_trainers_use_an_engine_that_was_deployed_apart(place: Path, port: int, trainable: str) -> None:
    """An adapter's sum is written into the engine's weights. A trainer of all of them brings every one and may follow;
    an adapter's would refuse an engine whose other weights differ.
    """
    recipe, _ = trained(place, trainable, "--train_type", trainable, "--async_generate", "true", *server(port))
    assert (recipe["max_lag"], recipe["sync"]["kind"]) == (1, "broadcast")
    publishes = published(place / "out" / trainable)
    assert set(publishes) == {1, 2, 3}
    assert all(event["probe_gap"] is not None for event in publishes.values())


@pytest.mark.parametrize(
    ("name", "words", "lag"),
    [
        ("sleeping", ("--train_type", "lora", "--sleep_level", "1"), 0),
        ("asynchronous", ("--train_type", "full", "--async_generate", "true"), 1),
    ],
)
def test_the_engine_is_part_of_the_job(place: Path, name: str, words: tuple[str, ...], lag: int) -> None:
    colocated = ("--vllm_mode", "colocate", "--vllm_max_model_len", "256", "--vllm_max_num_seqs", "32")
    recipe, output = trained(place, name, *words, *colocated, *own(), "threads=1")
    assert (recipe.get("max_lag", 0), recipe["sync"]["kind"]) == (lag, "shared")
    assert ("--sleep_level" in output) == (lag == 0)
    rows = [row for path in sorted((place / "out" / name / "rollouts").glob("*")) for row in lines(path)]
    assert max(row["step"] - 1 - row["versions"][0] for row in rows) == lag
    assert not (place / "out" / name / "engine-0.json").exists(), "its engine ended with it"
