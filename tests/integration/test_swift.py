"""ms-swift's two commands: a real vLLM by ``swift deploy``, a trainer elsewhere by ``swift rlhf``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import build_tiny_model
from integration.atropos_peers import free_port
from integration.vllm_runs import DTYPE, HEAD_DIM, engine, lines, metrics, needs_engine, published, same_logprobs, until

pytestmark = [needs_engine, pytest.mark.slow]

PLUGIN = """
from swift.plugin import ORM, orms


class Letters(ORM):
    def __call__(self, completions, solution, **columns):
        return [sum(c.isalpha() for c in text) / max(1, len(text)) for text, _ in zip(completions, solution)]


orms["letters"] = Letters
"""


def start(place: Path, said: str, *words: str) -> subprocess.Popen[bytes]:
    with (place / said).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tandem", "swift", *words],
            cwd=place,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def started() -> list[str]:
    """Options of Tandem's own that make the engine small enough for a test."""
    own = engine()
    names = ("python", "kv_cache_gb", "enforce_eager", "args", "gpu_memory_utilization")
    return [f"engine.{name}={json.dumps(own[name])}" for name in names if own.get(name) is not None]


@pytest.mark.parametrize("trains", ["full", "lora", "adapter"])
def test_a_trainer_uses_an_engine_that_was_deployed_apart(tmp_path: Path, trains: str) -> None:
    build_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    rows = [{"messages": [{"role": "user", "content": f"{i}+2="}], "solution": str(i + 2)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    port = str(free_port())
    common = ["--model", "tiny", "--torch_dtype", DTYPE]
    common += ["--vllm_enable_lora", "true"] if trains == "adapter" else []
    room = ["--vllm_max_lora_rank", "8"] if trains == "adapter" else []
    serving = start(
        tmp_path, "served.txt", "deploy", *common, "--host", "0.0.0.0", "--port", port,
        "--vllm_max_model_len", "256", "--vllm_max_num_seqs", "32", *room, *started(),
    )  # fmt: skip
    training = start(
        tmp_path, "trained.txt", "rlhf", "--rlhf_type", "grpo", *common,
        "--train_type", "full" if trains == "full" else "lora",
        "--dataset", "rows.jsonl", "--external_plugins", "plugin.py", "--reward_funcs", "letters",
        "--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_host", "0.0.0.0", "--vllm_server_port", port,
        "--vllm_server_timeout", "240", "--async_generate", "true", "--num_generations", "4",
        "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_completion_length", "12",
        "--max_steps", "4", "--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--beta", "0.04",
        "--max_length", "100", "--output_dir", "out", "--run_name", "run", "--log_completions", "true", "threads=1",
    )  # fmt: skip
    try:
        until(lambda: training.poll() is not None or serving.poll() is not None, "the end of training", 300)
        if training.poll() is None:
            pytest.fail((tmp_path / "served.txt").read_text())
        said = (tmp_path / "trained.txt").read_text() + (tmp_path / "served.txt").read_text()
        assert training.returncode == 0, said
        run = tmp_path / "out/run"
        assert list(metrics(run)) == [1, 2, 3, 4]
        assert set(published(run)) == {1, 2, 3, 4}
        assert all(event["probe_gap"] is not None for event in published(run).values())
        same_logprobs(run)
        table = lines(run / "completions.jsonl")
        assert [row["step"] for row in table] == [[str(step)] * 8 for step in (1, 2, 3, 4)]
        assert all(len(row["letters"]) == len(row["completion"]) == 8 for row in table)
        assert serving.poll() is None, "a trainer does not end an engine that it did not start"
    finally:
        for process in (training, serving):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)
    assert "ended" in (tmp_path / "served.txt").read_text()
