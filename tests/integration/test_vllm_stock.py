"""A plain ``vllm serve`` as the engine apart: adapters by name, each publish proven by a probe alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import build_tiny_model
from integration.vllm_runs import (
    CUDA,
    DTYPE,
    HEAD_DIM,
    Trainer,
    engine_python,
    groups_once,
    needs_engine,
    published,
    rollouts,
    same_logprobs,
    until,
)

from tandem.engines.vllm.spec import LINEAR
from tandem.ports import free_port

pytestmark = [needs_engine, pytest.mark.slow]

LORA = {"kind": "lora", "rank": 8, "alpha": 16}


@contextmanager
def stock_vllm(place: Path, model: Path) -> Iterator[str]:
    """vLLM's server by its own command line; its address."""
    port = free_port()
    here = "--gpu-memory-utilization 0.05" if CUDA else "--kv-cache-memory-bytes 250000000"
    words = (
        f"-m vllm.entrypoints.openai.api_server --model {model} --port {port} --dtype {DTYPE} --max-model-len 256 "
        f"--max-num-seqs 32 --enforce-eager {here} --enable-lora --max-lora-rank 8 --max-loras 3 "
        f"--lora-target-modules {' '.join(LINEAR)} --logprobs-mode processed_logprobs "
        "--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor"
    )
    command = [engine_python() or sys.executable, *words.split()]
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = place / "vllm.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=place, env={**os.environ, **own}, stdout=out, stderr=out, start_new_session=True
        )

    def up() -> bool:
        assert process.poll() is None, log.read_text()
        return "Application startup complete" in log.read_text()

    try:
        until(up, "the start of vLLM", 240)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_stock_vllm_is_published_to_and_a_killed_run_goes_on_with_it(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    with stock_vllm(tmp_path, model) as url:
        way = {"sync": "hotswap", "trainable": LORA, "max_lag": 1}
        engine = {"kind": "vllm", "urls": [url], "request_seconds": 60.0}
        run = Trainer.fresh(tmp_path / "trained", model, steps=5, engine=engine, **way)
        try:
            run.until(lambda: run.steps() >= 2 and run.saved(), "two steps")
            run.kill()
            run = Trainer(run.place, "runs/run")
            run.ended()
        finally:
            run.clean()
        assert run.output().count("proven by a probe alone") == 2
        events = published(run.folder)
        assert list(events) == [1, 2, 3, 4, 5]
        assert all(event["probe_alone"] and event["probe_gap"] is not None for event in events.values())
        rows = rollouts(run.folder)
        assert all(
            first == last and row["step"] - 2 <= first < row["step"]
            for row in rows
            for first, last in [row["versions"]]
        )
        groups_once(run.folder, each=4)
        same_logprobs(run.folder)
