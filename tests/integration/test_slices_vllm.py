"""Ranks whose weights are cut, and vLLM engines of two workers each: each rank writes its worker's slices."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny_model
from integration import vllm_runs as vllm
from safetensors.torch import load_file
from support.processes import start

from tandem.config.tree import render
from tandem.errors import RankError
from tandem.ports import free_port

pytestmark = [pytest.mark.slow, vllm.needs_engine]

WORKERS: dict[str, Any] = {"tensor_parallel_size": 2} if vllm.CUDA else {"tensor_parallel_size": 2, "args": {}}
"""On a CPU too each is a process of its own."""


CUT: dict[str, Any] = {"ranks": 2, "distributed": {"shard": "weights"}, "sync": "shared", "trainable": "full"}
CLOSE = 3e-6
"""Most by which a weight may differ from one rank's after a few steps."""

needs_two_gpus = pytest.mark.skipif(vllm.CUDA and torch.cuda.device_count() < 2, reason="two ranks need two GPUs")


@needs_two_gpus
def test_ranks_write_the_slices_of_their_workers(tmp_path: Path) -> None:
    """Every publish is proven on the bytes of both workers; a run that is killed goes on, with the engine it left."""
    model = build_tiny_model(tmp_path / "tiny", head_dim=vllm.HEAD_DIM)
    options = vllm.recipe(model, tmp_path / "runs", name="slices", steps=100, engine=vllm.engine(**WORKERS), **CUT)
    run = tmp_path / "runs" / "slices"
    with started(tmp_path, written(tmp_path, options)) as process:
        saved = run / "checkpoints" / "000002"
        vllm.until(lambda: saved.exists() or process.poll() is not None, "step 2", 400)
        process.kill()
    newest = max(int(folder.name) for folder in saved.parent.glob("[0-9]*"))
    with started(tmp_path, run, f"steps={newest + 1}") as process:
        ended(process)
    events = [event for event in vllm.lines(run / "events.jsonl") if event["event"] == "published"]
    assert {event["step"] for event in events} == set(range(1, newest + 2))
    assert all(event["probe_gap"] <= vllm.GAP for event in events)
    assert len({event["digest"] for event in events}) > newest, "every step moved the weights"
    vllm.same_logprobs(run)
    before, after = load_file(model / "model.safetensors"), vllm.weights(run, newest + 1)
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}


@needs_two_gpus
@pytest.mark.long
@pytest.mark.parametrize("context", [1, 2], ids=["each its own rows", "shared rows"])
def test_slices_train_what_one_rank_trains_and_outlive_their_engine(tmp_path: Path, context: int) -> None:
    """A killed engine is started again, attached by both ranks and published to; the weights are one rank's."""
    model = build_tiny_model(tmp_path / "tiny", head_dim=vllm.HEAD_DIM)
    # Where a gradient is all noise, its sign decides Adam's step: eps makes that step small.
    same = {"steps": 4, "seed": 3, "optimizer": {"lr": 1.0e-3, "eps": 1.0e-3}}
    engine = vllm.engine(seeded=True, **WORKERS)
    distributed = {"shard": "weights", "context_parallel": context}
    cut = vllm.recipe(
        model, tmp_path / "runs", name="cut", engine=engine, **{**CUT, "distributed": distributed}, **same
    )
    alone = vllm.recipe(model, tmp_path / "runs", name="alone", engine=vllm.engine(seeded=True), **same)
    run = tmp_path / "runs" / "cut"
    with started(tmp_path, written(tmp_path, cut)) as process:
        vllm.until(lambda: vllm.published(run) or process.poll() is not None, "the first publish", 400)
        os.kill(json.loads((run / "engine-0.json").read_text())["pid"], signal.SIGKILL)
        ended(process)
    with started(tmp_path, written(tmp_path, alone)) as process:
        ended(process)
    assert sorted(vllm.published(run)) == [1, 2, 3, 4]
    one, two = vllm.weights(tmp_path / "runs" / "alone", 4), vllm.weights(run, 4)
    assert one.keys() == two.keys()
    started_from = load_file(model / "model.safetensors")
    for name, tensor in one.items():
        assert float((tensor - started_from[name]).abs().max()) > 30 * CLOSE, name
        assert float((tensor - two[name]).abs().max()) < CLOSE, name


@pytest.mark.skipif(vllm.CUDA and torch.cuda.device_count() < 4, reason="four ranks need four GPUs")
@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_four_ranks_share_two_engines_and_go_on_as_two_with_one(tmp_path: Path, replicas: int) -> None:
    """Shards of all, or replicas: a killed engine is started again, both are proven, the weights are one rank's."""
    model = build_tiny_model(tmp_path / "tiny", head_dim=vllm.HEAD_DIM)
    same = {"steps": 2, "seed": 3, "optimizer": {"lr": 1.0e-3, "eps": 1.0e-3}}
    engine = vllm.engine(seeded=True, **WORKERS)
    of_four = {**CUT, "ranks": 4, "distributed": {"shard": "weights", "replicas": replicas}}
    cut = vllm.recipe(model, tmp_path / "runs", name="cut", engine=engine, **of_four, **same)
    alone = vllm.recipe(model, tmp_path / "runs", name="alone", engine=vllm.engine(seeded=True), **same)
    run = tmp_path / "runs" / "cut"
    with started(tmp_path, written(tmp_path, cut)) as process:
        vllm.until(lambda: vllm.published(run) or process.poll() is not None, "the first publish", 500)
        # All of its processes at once: its core holds its port.
        os.killpg(json.loads((run / "engine-1.json").read_text())["pid"], signal.SIGKILL)
        ended(process)
    with started(tmp_path, written(tmp_path, alone)) as process:
        ended(process)
    assert not (run / "engine-2.json").exists(), "one for each two ranks"
    events = vllm.published(run)
    assert sorted(events) == [1, 2]
    assert all(event["probe_gap"] <= vllm.GAP for event in events.values())
    one, four = vllm.weights(tmp_path / "runs" / "alone", 2), vllm.weights(run, 2)
    started_from = load_file(model / "model.safetensors")
    for name, tensor in one.items():
        assert float((tensor - started_from[name]).abs().max()) > 30 * CLOSE, name
        assert float((tensor - four[name]).abs().max()) < CLOSE, name
    with started(tmp_path, run, "ranks=2", "distributed.replicas=1", "steps=3") as process:
        ended(process)
    assert sorted(vllm.published(run)) == [1, 2, 3]
    vllm.same_logprobs(run)


@pytest.mark.skipif(vllm.CUDA, reason="ranks of two hosts would each take the first GPU")
@pytest.mark.long
def test_ranks_of_two_hosts_have_an_engine_on_each_and_end_with_one_of_them(tmp_path: Path) -> None:
    """Each host's first rank starts its engine; when a rank is killed all end by its name, and its run goes on."""
    model = build_tiny_model(tmp_path / "tiny", head_dim=vllm.HEAD_DIM)
    engine = vllm.engine(**WORKERS)
    recipe = vllm.recipe(model, tmp_path / "runs", name="hosts", steps=50, engine=engine, **{**CUT, "ranks": 4})
    run, port = tmp_path / "runs" / "hosts", free_port()
    ranks = []
    for rank in range(4):
        place = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        place_text = {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in place.items()}}
        ranks.append(started(tmp_path, written(tmp_path, recipe), **place_text))
    with contextlib.ExitStack() as stack:
        for process in ranks:
            stack.enter_context(process)
        vllm.until(
            lambda: (run / "checkpoints/000001").exists() or any(p.poll() is not None for p in ranks), "a step", 400
        )
        assert [process.poll() for process in ranks] == [None] * 4
        records = [json.loads((run / f"engine-{number}.json").read_text()) for number in (0, 1)]
        ranks[3].kill()
        outputs = [process.communicate(timeout=60)[0] for process in ranks]
        assert ranks[0].returncode == RankError.exit_code, outputs[0]
        assert all(process.returncode for process in ranks), "a collective broke, or the lead said so"
        assert "rank 3 (pid" in str(outputs[0])
    newest = max(int(folder.name) for folder in (run / "checkpoints").glob("[0-9]*"))
    with started(tmp_path, run, f"steps={newest + 1}") as process:
        ended(process)
    assert len({record["pid"] for record in records}) == 2
    events = [event for event in vllm.lines(run / "events.jsonl") if event["event"] == "published"]
    assert {event["step"] for event in events} == set(range(1, newest + 2))
    assert all(event["probe_gap"] <= vllm.GAP for event in events)


def written(folder: Path, options: dict[str, Any]) -> Path:
    recipe = folder / f"{options['name']}.yaml"
    recipe.write_text(render(options), encoding="utf-8")
    return recipe


def started(folder: Path, what: Path, *overrides: str, **variables: str) -> Any:
    source = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{source / 'tests'}", "OMP_NUM_THREADS": "1", **variables}
    return start(["train", str(what), *overrides], cwd=folder, out=subprocess.PIPE, environment=env)


def ended(process: Any) -> None:
    """See that a run ends well."""
    output, _ = process.communicate(timeout=540)
    assert process.returncode == 0, output
